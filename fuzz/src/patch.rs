//! Small inputs for large files: a sound file and what to scribble over it.

/// One scribble: three bytes of offset, a byte of length and kind, then up to eight bytes.
const STEP: usize = 12;

/// Scribbles `data` over `file`. Offsets below 4096 come in bytes, others in words of eight, so that
/// every field of the pages is met often.
pub fn scribble(file: &mut [u8], data: &[u8]) {
    for step in data.chunks(STEP) {
        let mut bytes = [0; STEP];
        bytes[..step.len()].copy_from_slice(step);
        let [o0, o1, o2, kind, ref value @ ..] = bytes;
        let raw = usize::from(o0) | usize::from(o1) << 8 | usize::from(o2) << 16;
        let at = if raw < 4096 { raw } else { raw / 8 * 8 };
        let length = usize::from(kind & 7) + 1;
        let Some(at) = at.checked_rem(file.len()) else { return };
        let end = (at + length).min(file.len());
        if kind & 0x80 != 0 {
            // As running processes change a page: a word grows or shrinks a little.
            file[at] = file[at].wrapping_add(value[0]);
        } else {
            file[at..end].copy_from_slice(&value[..end - at]);
        }
    }
}
