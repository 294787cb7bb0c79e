//! Formats of array elements: cuda.h, `CUarray_format`.

/// How many bits an element of a format takes, and for compressed formats the edge of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    /// Bits of an element; of a block for compressed ones.
    pub bits: u64,
    /// Elements along the edge of a block.
    pub block: u64,
    /// Whether it has several planes, which can't be copied as one.
    pub planar: bool,
}

/// The format with this many channels; no such thing: `None`.
pub(crate) fn of(format: i32, channels: u32) -> Option<Format> {
    let plain = |bits: u64| Some(Format { bits, block: 1, planar: false });
    let packed = |n: u32, bits: u64| if channels == n { plain(bits) } else { None };
    let planar =
        |bits: u64| (1..=4).contains(&channels).then_some(Format { bits, block: 1, planar: true });
    let compressed =
        |bits: u64| (1..=4).contains(&channels).then_some(Format { bits, block: 4, planar: false });
    let channel_bits = match format {
        0x01 | 0x08 => 8,
        0x02 | 0x09 | 0x10 => 16,
        0x03 | 0x0a | 0x20 => 32,
        _ => 0,
    };
    if channel_bits > 0 {
        return match channels {
            1 | 2 | 4 => plain(channel_bits * u64::from(channels)),
            _ => None,
        };
    }
    match format {
        // UNORM and SNORM of 8 and 16 bits with 1, 2 and 4 channels.
        0xc0 | 0xc6 => packed(1, 8),
        0xc1 | 0xc7 => packed(2, 16),
        0xc2 | 0xc8 => packed(4, 32),
        0xc3 | 0xc9 => packed(1, 16),
        0xc4 | 0xca => packed(2, 32),
        0xc5 | 0xcb => packed(4, 64),
        // UNORM_INT_101010_2.
        0x50 => packed(4, 32),
        // BC1 and BC4 have 8 bytes a block, the others 16.
        0x91 | 0x92 | 0x97 | 0x98 => compressed(64),
        0x93..=0x96 | 0x99..=0x9e => compressed(128),
        // Two planes at 4:2:0, 4:2:2 and 4:4:4, of 8 and 16 bits.
        0xb0 | 0x53 | 0x59 => planar(12),
        0x9f | 0xa1 | 0x54 | 0x5a => planar(24),
        0xa2 | 0x55 | 0x5b => planar(16),
        0xa3 | 0xa4 | 0x56 | 0x5c => planar(32),
        0xb2 | 0xb4 | 0x57 | 0x5d => planar(24),
        0xb3 | 0xb5 | 0x58 | 0x5e => planar(48),
        // YUY2, Y210, Y216, AYUV, Y410, Y416 and their successors: packed.
        0xa5 | 0x51 => plain(16),
        0xa6..=0xa9 | 0x52 => plain(32),
        0xb1 => plain(64),
        _ => None,
    }
}
