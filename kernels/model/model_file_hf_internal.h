/* The parts of the reader of HF folders. */
#ifndef BT_KERNELS_MODEL_MODEL_FILE_HF_INTERNAL_H
#define BT_KERNELS_MODEL_MODEL_FILE_HF_INTERNAL_H

#include "kernels/model/model_file_internal.h"
#include "kernels/model/model_settings.h"

/* config.json: the geometry and the EOS ids. What would change what is computed and is not built is
 * CALLER_UNSUPPORTED, by name. */
BT_MUST_CHECK bt_status model_file_read_config(model_file *file, const model_settings *s);
/* generation_config.json: more EOS ids. */
BT_MUST_CHECK bt_status model_file_read_generation(model_file *file, const model_settings *s);
/* The part of config.json about rotary positions; context_tokens is known. */
BT_MUST_CHECK bt_status model_file_read_rope(const model_settings *s, model_geometry *g);

#endif
