//! Which entry of the quota page a device is. Matched by UUID, never by ordinal:
//! `CUDA_VISIBLE_DEVICES` renumbers devices.

use crate::real;
use core::sync::atomic::{AtomicU8, Ordering};
use tessera_cuda::types::{CUDA_SUCCESS, CUdevice, CUuuid};

/// Devices remembered; others are looked up each time.
const DEVICES: usize = 64;
/// Not asked yet.
const UNKNOWN: u8 = 0;
/// Asked: the page does not name it.
const UNLISTED: u8 = 1;
/// Entry 0 of the page; entry n is `FIRST + n`.
const FIRST: u8 = 2;

/// A device, as the quota page sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listed {
    /// Entry of the page.
    Gpu(u8),
    /// Visible, but not part of this allocation: its limit is 0.
    No {
        /// Its UUID as NVML prints it, when that was found out just now.
        news: Option<[u8; TEXT_LEN]>,
    },
}

/// Remembers what devices are.
#[derive(Debug)]
pub struct Gpus {
    known: [AtomicU8; DEVICES],
}

impl Default for Gpus {
    fn default() -> Self {
        Self::new()
    }
}

impl Gpus {
    /// Nothing asked yet.
    pub const fn new() -> Self {
        Self { known: [const { AtomicU8::new(UNKNOWN) }; DEVICES] }
    }

    /// What `device` is among `uuids`; `None` where the driver does not tell (not initialised, no
    /// such device).
    pub fn listed<'a>(
        &self,
        device: CUdevice,
        uuids: impl Iterator<Item = &'a str>,
    ) -> Option<Listed> {
        let cell = usize::try_from(device).ok().and_then(|at| self.known.get(at));
        match cell.map_or(UNKNOWN, |cell| cell.load(Ordering::Relaxed)) {
            UNKNOWN => {}
            UNLISTED => return Some(Listed::No { news: None }),
            listed => return Some(Listed::Gpu(listed - FIRST)),
        }
        let uuid = uuid_of(device)?;
        let found = position(uuid, uuids);
        let word = found.map_or(UNLISTED, |index| FIRST + index);
        let news = cell.is_some_and(|cell| cell.swap(word, Ordering::Relaxed) == UNKNOWN);
        Some(found.map_or(
            Listed::No { news: news.then(|| text(&uuid, is_instance(device, uuid))) },
            Listed::Gpu,
        ))
    }

    /// Which device entry `gpu` of the page is, among those that were looked up.
    pub fn device_of(&self, gpu: u8) -> Option<CUdevice> {
        let word = FIRST + gpu;
        let at = self.known.iter().position(|cell| cell.load(Ordering::Relaxed) == word)?;
        CUdevice::try_from(at).ok()
    }
}

/// `cuDeviceGetUuid_v2` tells a MIG instance's own UUID, the first version its parent's.
fn uuid_of(device: CUdevice) -> Option<CUuuid> {
    let ask = real::cuDeviceGetUuid_v2.get().or_else(|| real::cuDeviceGetUuid.get())?;
    let mut uuid = CUuuid::default();
    // SAFETY: `uuid` is a valid place for 16 bytes; any device number may be asked for.
    (unsafe { ask(&raw mut uuid, device) } == CUDA_SUCCESS).then_some(uuid)
}

/// Whether the device with this UUID of its own is a MIG instance: its GPU has another.
fn is_instance(device: CUdevice, uuid: CUuuid) -> bool {
    let mut gpu = CUuuid::default();
    // SAFETY: as in `uuid_of`.
    let result = real::cuDeviceGetUuid.get().map(|ask| unsafe { ask(&raw mut gpu, device) });
    result == Some(CUDA_SUCCESS) && gpu.bytes != uuid.bytes
}

fn position<'a>(uuid: CUuuid, uuids: impl Iterator<Item = &'a str>) -> Option<u8> {
    uuids
        .enumerate()
        .find(|(_, text)| parse(text) == Some(uuid.bytes))
        .and_then(|(index, _)| u8::try_from(index).ok())
}

/// The bytes of `GPU-…` or `MIG-…`.
fn parse(text: &str) -> Option<[u8; 16]> {
    let digits = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-"))?;
    let mut bytes = [0u8; 16];
    let mut nibbles = 0usize;
    for c in digits.chars().filter(|&c| c != '-') {
        let value = u8::try_from(c.to_digit(16)?).ok()?;
        let byte = bytes.get_mut(nibbles / 2)?;
        *byte = *byte << 4 | value;
        nibbles += 1;
    }
    (nibbles == 32).then_some(bytes)
}

/// Characters of a UUID as NVML prints it: `GPU-` and 36 more.
pub(crate) const TEXT_LEN: usize = 40;

/// A UUID as NVML prints it.
fn text(uuid: &CUuuid, instance: bool) -> [u8; TEXT_LEN] {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let mut text = *b"GPU-00000000-0000-0000-0000-000000000000";
    if instance {
        text[..3].copy_from_slice(b"MIG");
    }
    let digits = uuid.bytes.iter().flat_map(|&byte| [byte >> 4, byte & 15]);
    let places = text[4..].iter_mut().filter(|place| **place != b'-');
    for (place, digit) in places.zip(digits) {
        *place = HEX[usize::from(digit)];
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";
    const BYTES: [u8; 16] = [
        0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee,
        0xff,
    ];

    #[test]
    fn uuids_are_parsed() {
        assert_eq!(parse(TEXT), Some(BYTES));
        assert_eq!(parse(&TEXT.replace("GPU", "MIG")), Some(BYTES));
        assert_eq!(parse(&TEXT.to_uppercase()), Some(BYTES));
    }

    #[test]
    fn uuids_are_printed_as_parsed() {
        assert_eq!(text(&CUuuid { bytes: BYTES }, false), TEXT.as_bytes());
        assert_eq!(text(&CUuuid { bytes: BYTES }, true), TEXT.replace("GPU", "MIG").as_bytes());
    }

    #[test]
    fn other_texts_are_no_uuid() {
        for text in ["", "GPU-", "GPU-0011", "0", &TEXT[4..], &format!("{TEXT}0"), "GPU-zz"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn position_is_by_uuid() {
        let uuid = CUuuid { bytes: BYTES };
        let other = "GPU-ffffffff-4455-6677-8899-aabbccddeeff";
        assert_eq!(position(uuid, [other, TEXT].into_iter()), Some(1));
        assert_eq!(position(uuid, [other].into_iter()), None);
    }
}
