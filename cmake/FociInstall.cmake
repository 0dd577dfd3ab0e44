# What `cmake --install` puts on a system: the program, libfoci.so and libfoci.a, the headers of the
# public floors, and what find_package(foci) and pkg-config read.
#
# Kernels, the oracle, verify and the command line stay inside: the libraries hold kernels, since
# attention calls them, but no header and no symbol of theirs is for others.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(public_floors core spec attention io autograd nn models insight report vision)

set(objects "")
foreach(floor IN LISTS public_floors ITEMS kernels)
  list(APPEND objects $<TARGET_OBJECTS:foci_${floor}>)
endforeach()

# The outside libraries that foci's code calls, as the linker names them.
set(private_libraries hwy tbb dnnl png jpeg z ${CMAKE_DL_LIBS})

add_library(foci_shared SHARED ${objects})
set_target_properties(foci_shared PROPERTIES
  OUTPUT_NAME foci EXPORT_NAME foci LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib
  VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
target_link_libraries(foci_shared
  PUBLIC fmt::fmt
  PRIVATE PkgConfig::HWY TBB::tbb foci_dnnl PNG::PNG JPEG::JPEG ZLIB::ZLIB ${CMAKE_DL_LIBS})
target_link_options(foci_shared PRIVATE -Wl,--no-undefined)

add_library(foci_static STATIC ${objects})
set_target_properties(foci_static PROPERTIES
  OUTPUT_NAME foci ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
target_link_libraries(foci_static PUBLIC fmt::fmt INTERFACE ${private_libraries})

foreach(target IN ITEMS foci_shared foci_static)
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
  target_compile_features(${target} INTERFACE cxx_std_20)
  target_include_directories(${target} INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
endforeach()

install(TARGETS foci_shared foci_static EXPORT foci_targets)
if(TARGET foci_program)
  install(TARGETS foci_program)
endif()

foreach(floor IN LISTS public_floors)
  get_property(headers GLOBAL PROPERTY FOCI_HEADERS_${floor})
  foreach(header IN LISTS headers)
    get_filename_component(folder ${header} DIRECTORY)
    install(FILES ${PROJECT_SOURCE_DIR}/foci/${floor}/${header}
      DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/foci/${floor}/${folder})
  endforeach()
endforeach()

set(config_folder ${CMAKE_INSTALL_LIBDIR}/cmake/foci)
install(EXPORT foci_targets NAMESPACE foci:: FILE foci-targets.cmake DESTINATION ${config_folder})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/foci-config.cmake.in
  ${PROJECT_BINARY_DIR}/foci-config.cmake INSTALL_DESTINATION ${config_folder})
# Until 1.0 every minor version may break its users.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/foci-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/foci-config.cmake ${PROJECT_BINARY_DIR}/foci-config-version.cmake
  DESTINATION ${config_folder})

file(RELATIVE_PATH FOCI_PC_TO_PREFIX /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
list(TRANSFORM private_libraries PREPEND -l OUTPUT_VARIABLE flags)
list(JOIN flags " " FOCI_PRIVATE_LIBS)
configure_file(${PROJECT_SOURCE_DIR}/cmake/foci.pc.in ${PROJECT_BINARY_DIR}/foci.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/foci.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
