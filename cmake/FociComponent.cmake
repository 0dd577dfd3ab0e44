# Makes a floor's include root and names it in OUT.
function(foci_include_root NAME OUT)
  # The links depend on the sources alone, so every preset shares them.
  set(root ${PROJECT_SOURCE_DIR}/build/floors/${NAME})
  file(MAKE_DIRECTORY ${root}/foci)
  if(NOT EXISTS ${root}/foci/${NAME})
    file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR} ${root}/foci/${NAME} SYMBOLIC)
  endif()
  set(${OUT} ${root} PARENT_SCOPE)
endfunction()

# foci_component(NAME HEADERS ... SOURCES ... DEPS ... [PRIVATE_HEADERS ...] [PRIVATE_DEPS ...]
#                [LIBS ...] [PRIVATE_LIBS ...])
#
# Declares one floor of the house. A floor's headers are reachable only through an include root of
# its own (build/floors/NAME, holding a link foci/NAME to the sources), and that root is handed only
# to the floors that name it in DEPS. So an include of a floor that was not declared below this one
# does not compile, whatever happens to lie beside it in the tree.
#
# HEADERS          for the floors above, and for programs that use the installed library
# PRIVATE_HEADERS  not installed: for this floor's .cc files, its tests, and floors that know what they
#                  hold; may use PRIVATE_DEPS and PRIVATE_LIBS. A header that says "private" is one
# DEPS             floors whose headers this floor's own headers use
# PRIVATE_DEPS     floors used only inside .cc files and private headers
# LIBS             outside libraries (public)
# PRIVATE_LIBS     outside libraries that no public header mentions
function(foci_component NAME)
  cmake_parse_arguments(C "" "" "HEADERS;PRIVATE_HEADERS;SOURCES;DEPS;PRIVATE_DEPS;LIBS;PRIVATE_LIBS" ${ARGN})
  if(C_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "foci_component(${NAME}): unknown argument ${C_UNPARSED_ARGUMENTS}")
  endif()
  foci_include_root(${NAME} root)
  foreach(file IN LISTS C_HEADERS C_PRIVATE_HEADERS C_SOURCES)
    if(NOT EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${file})
      message(FATAL_ERROR "foci_component(${NAME}): no file ${file}")
    endif()
  endforeach()
  # Floors are declared lowest first, so a floor above this one does not exist yet.
  foreach(dep IN LISTS C_DEPS C_PRIVATE_DEPS)
    if(NOT TARGET foci_${dep})
      message(FATAL_ERROR "foci_component(${NAME}): ${dep} is not a floor below it")
    endif()
    # The oracle must share nothing with what it judges, so the fast path cannot link it.
    if(dep STREQUAL "reference" AND NOT NAME MATCHES "^(verify|cli)$")
      message(FATAL_ERROR "foci_component(${NAME}): only tests, benchmarks and verify use reference")
    endif()
  endforeach()
  set(deps ${C_DEPS})
  list(TRANSFORM deps PREPEND foci_)
  set(private_deps ${C_PRIVATE_DEPS})
  list(TRANSFORM private_deps PREPEND foci_)
  add_library(foci_${NAME} STATIC ${C_SOURCES} ${C_HEADERS} ${C_PRIVATE_HEADERS})
  target_include_directories(foci_${NAME} PUBLIC ${root})
  target_compile_options(foci_${NAME} PRIVATE ${FOCI_WARNINGS})
  target_link_libraries(foci_${NAME}
    PUBLIC ${deps} ${C_LIBS}
    PRIVATE ${private_deps} ${C_PRIVATE_LIBS})
  set_property(GLOBAL APPEND PROPERTY FOCI_COMPONENTS ${NAME})
  set_property(GLOBAL PROPERTY FOCI_HEADERS_${NAME} "${C_HEADERS}")
  set_property(GLOBAL PROPERTY FOCI_SOURCES_${NAME} "${C_SOURCES}")
  set_property(GLOBAL PROPERTY FOCI_DEPS_${NAME} "${C_DEPS}")
  set_property(GLOBAL PROPERTY FOCI_PRIVATE_DEPS_${NAME} "${C_PRIVATE_DEPS}")
endfunction()
