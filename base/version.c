/* Its own file, so that a new version compiles one object and not the whole tree. */
#include "base/version.h"

const char bt_version[] = BT_PROJECT_VERSION;
