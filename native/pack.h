// From the blocks of a GGUF file to panels (formats.h), and to floats.
#pragma once
#include "formats.h"

namespace twostep {

float f16_to_f32(uint16_t half);

// Decodes one row of `inputs` elements as it lies in the file.
void decode_row(Format format, const uint8_t* row, int inputs, float* out);

// Fills one panel from 16 file rows; a null row stands for zeros.
void pack_panel(Format format, const uint8_t* const rows[kPanel], int inputs, uint8_t* panel);

}  // namespace twostep
