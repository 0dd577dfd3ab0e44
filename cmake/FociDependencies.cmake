# Outside libraries, all from Debian 12 or 13. `run` installs them.
find_package(PkgConfig REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(TBB REQUIRED)
find_package(CLI11 REQUIRED)
find_package(PNG REQUIRED)
find_package(JPEG REQUIRED)
find_package(ZLIB REQUIRED)
pkg_check_modules(HWY REQUIRED IMPORTED_TARGET libhwy)

# Debian's dnnl CMake package asks for OpenCL, which foci does not use; the library alone is enough.
find_library(DNNL_LIBRARY dnnl REQUIRED)
find_path(DNNL_INCLUDE_DIR oneapi/dnnl/dnnl.h REQUIRED)
add_library(foci_dnnl INTERFACE)
target_link_libraries(foci_dnnl INTERFACE ${DNNL_LIBRARY})
target_include_directories(foci_dnnl SYSTEM INTERFACE ${DNNL_INCLUDE_DIR})
