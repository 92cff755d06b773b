/* Choosing the instruction set at run time. */
#include "kernels/host/isa.h"

#include <string.h>

#include "base/compiler.h"

static const host_isa *const sets[] = {
#if defined(__x86_64__)
    &host_isa_avx512,
    &host_isa_avx2,
#elif defined(__aarch64__)
    &host_isa_neon,
#endif
    &host_isa_portable,
};

const host_isa *host_isa_at(uint32_t index) {
    for (size_t i = 0; i < BT_ARRAY_COUNT(sets); i++) {
        if (!sets[i]->is_supported()) continue;
        if (index == 0) return sets[i];
        index--;
    }
    return NULL;
}

const host_isa *host_isa_find(const char *name) {
    if (name == NULL) return host_isa_at(0);
    for (size_t i = 0; i < BT_ARRAY_COUNT(sets); i++)
        if (strcmp(sets[i]->name, name) == 0) return sets[i]->is_supported() ? sets[i] : NULL;
    return NULL;
}
