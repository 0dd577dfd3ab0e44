// The program `foci`.
#include "foci/cli/verb.h"

int main(int argc, char** argv) {
  return foci::cli::run_program(argc, argv);
}
