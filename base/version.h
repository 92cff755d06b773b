/* The version of this build: PROJECT_VERSION of CMakeLists.txt, which is the only place that says
 * it. */
#ifndef BT_BASE_VERSION_H
#define BT_BASE_VERSION_H

extern const char bt_version[]; /* "MAJOR.MINOR.PATCH" */

#endif
