//! Numbers and texts in few bytes: LEB128, and texts behind their length.

/// Longest text; what is longer is cut. Kubernetes' names have at most 253 bytes.
const TEXT: usize = 512;

pub(crate) fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}

/// The step from one number to another.
pub(crate) fn put_step(out: &mut Vec<u8>, from: u64, to: u64) {
    let step = to.wrapping_sub(from).cast_signed();
    put(out, ((step << 1) ^ (step >> 63)).cast_unsigned());
}

pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    let mut end = TEXT.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    put(out, end as u64);
    out.extend_from_slice(&text.as_bytes()[..end]);
}

/// What is left to read. `None` of its methods: damaged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn number(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    pub(crate) fn step(&mut self, from: u64) -> Option<u64> {
        let coded = self.number()?;
        let step = (coded >> 1).cast_signed() ^ -(coded & 1).cast_signed();
        Some(from.wrapping_add(step.cast_unsigned()))
    }

    pub(crate) fn text(&mut self) -> Option<&'a str> {
        let len = usize::try_from(self.number()?).ok()?;
        let (text, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        std::str::from_utf8(text).ok()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
