# cmake -D INPUT=file -D OUTPUT=file.cc -D NAME=symbol -P embed.cmake
# Writes INPUT's bytes as a C++ array, so that the library carries its data with it. CMake does it
# alone: a fresh machine has no xxd.
file(READ ${INPUT} hex HEX)
string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
string(REGEX REPLACE "(................................................................................)" "\\1\n" bytes "${bytes}")
get_filename_component(source ${INPUT} NAME)
file(WRITE ${OUTPUT} "// The bytes of data/${source}, written by embed.cmake.
#include <cstddef>
namespace foci::vision {
extern const unsigned char ${NAME}[];
extern const std::size_t ${NAME}_size;
const unsigned char ${NAME}[] = {
${bytes}};
const std::size_t ${NAME}_size = sizeof(${NAME});
}  // namespace foci::vision
")
