//! Which entry of the quota page a device is. Matched by UUID, never by ordinal:
//! `CUDA_VISIBLE_DEVICES` renumbers devices.

use crate::real::{self, Real};
use core::sync::atomic::{AtomicU8, Ordering};
use tessera_cuda::types::{CUdevice, CUresult, CUuuid};

/// Devices remembered; others are looked up each time.
const DEVICES: usize = 64;
const UNKNOWN: u8 = 0;
/// Asked: the page does not name it.
const UNLISTED: u8 = 1;
/// Entry 0 of the page; entry n is `FIRST + n`.
const FIRST: u8 = 2;

/// Remembers what devices are.
#[derive(Debug)]
pub struct Gpus {
    known: [AtomicU8; DEVICES],
}

impl Gpus {
    pub const fn new() -> Self {
        Self { known: [const { AtomicU8::new(UNKNOWN) }; DEVICES] }
    }

    /// The entry of the page that `device` is among `uuids`, if any: visible, but not part of this allocation its
    /// limit is 0, and `news` gets its UUID as NVML prints it when that was found out just now. `None` where the driver
    /// does not tell (not initialised, no such device).
    pub fn listed<'a>(
        &self,
        device: CUdevice,
        uuids: impl Iterator<Item = &'a str>,
        news: impl FnOnce([u8; TEXT_LEN]),
    ) -> Option<Option<u8>> {
        let cell = usize::try_from(device).ok().and_then(|at| self.known.get(at));
        match cell.map_or(UNKNOWN, |cell| cell.load(Ordering::Relaxed)) {
            UNKNOWN => {}
            UNLISTED => return Some(None),
            listed => return Some(Some(listed - FIRST)),
        }
        let uuid = uuid_of(device)?;
        let found = position(uuid, uuids);
        let word = found.map_or(UNLISTED, |index| FIRST + index);
        let is_new = cell.is_some_and(|cell| cell.swap(word, Ordering::Relaxed) == UNKNOWN);
        if found.is_none() && is_new {
            news(text(&uuid, is_instance(device, uuid)));
        }
        Some(found)
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
    let (new, old) = (&real::cuDeviceGetUuid_v2, &real::cuDeviceGetUuid);
    ask(if new.get().is_some() { new } else { old }, device)
}

/// Whether the device with this UUID of its own is a MIG instance: its GPU has another.
fn is_instance(device: CUdevice, uuid: CUuuid) -> bool {
    ask(&real::cuDeviceGetUuid, device).is_some_and(|gpu| gpu != uuid)
}

type GetUuid = Real<unsafe extern "C" fn(*mut CUuuid, CUdevice) -> CUresult>;

fn ask(real: &GetUuid, device: CUdevice) -> Option<CUuuid> {
    // SAFETY: a valid place for 16 bytes; any device number may be asked for.
    real.ask(CUuuid::default(), |ask, uuid| unsafe { ask(uuid, device) }).ok()
}

/// Whatever it calls itself, a GPU or an instance.
fn position<'a>(uuid: CUuuid, mut uuids: impl Iterator<Item = &'a str>) -> Option<u8> {
    let digits = &text(&uuid, false)[4..];
    let is_it =
        |text: &str| text.as_bytes().get(4..).is_some_and(|of| of.eq_ignore_ascii_case(digits));
    uuids.position(is_it).and_then(|index| u8::try_from(index).ok())
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
    fn uuids_are_printed_as_by_nvml() {
        assert_eq!(text(&CUuuid { bytes: BYTES }, false), TEXT.as_bytes());
        assert_eq!(text(&CUuuid { bytes: BYTES }, true), TEXT.replace("GPU", "MIG").as_bytes());
    }

    #[test]
    fn position_is_by_uuid() {
        let uuid = CUuuid { bytes: BYTES };
        let other = "GPU-ffffffff-4455-6677-8899-aabbccddeeff";
        for text in [TEXT, &TEXT.replace("GPU", "MIG"), &TEXT.to_uppercase()] {
            assert_eq!(position(uuid, [other, text].into_iter()), Some(1), "{text}");
        }
        for text in ["", "GPU-", "GPU-0011", &TEXT[4..], &format!("{TEXT}0"), other] {
            assert_eq!(position(uuid, [text].into_iter()), None, "{text:?}");
        }
    }
}
