//! Where an allocation of the calling thread would go: which context owns it, on which GPU.

use crate::contexts::{Context, Place, primary_lock, remember};
use crate::gate::Stream;
use crate::own;
use crate::quota::{self, Asked};
use crate::real::{self, Real};
use crate::state::Process;
use crate::thread::CachedPlace;
use core::ptr;
use core::sync::atomic::{AtomicU8, Ordering};
use tessera_cuda::types::*;
use tessera_region::account::Refused;
use tessera_region::layout::Kind;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    At(Place),
    /// No context, or the driver does not tell: the driver's own call will say what is wrong.
    Nowhere,
    /// The context was made behind our back, and its overhead does not fit the quota.
    Refused(Refused),
    /// The context was made behind our back, on this GPU of the page, and the kernel has no memory to
    /// note it: nothing may be granted there.
    Unnoted(Option<u8>),
}

impl Look {
    /// The place for `name`, which is refused where the context cannot be; `None` where the driver's own
    /// call is to say what is wrong.
    pub(crate) fn or_refuse(
        self,
        process: &'static Process,
        name: &str,
    ) -> Result<Option<Place>, CUresult> {
        match self {
            Self::At(place) => Ok(Some(place)),
            Self::Nowhere => Ok(None),
            Self::Refused(refused) => Err(quota::refuse(process, name, Asked::Context, &refused)),
            Self::Unnoted(_) => Err(quota::refuse_unnoted(name)),
        }
    }

    /// The context's serial, 0 where there is none.
    pub(crate) fn serial(self) -> u32 {
        match self {
            Self::At(place) => place.serial,
            _ => 0,
        }
    }
}

#[inline]
pub(crate) fn current(process: &'static Process) -> Look {
    match current_context() {
        Some(context) => of_context(process, context, true),
        None => Look::Nowhere,
    }
}

/// The place of a stream: its own context's where it names one, else the current one's.
pub(crate) fn of_stream(process: &'static Process, stream: Stream) -> Look {
    match context_of(stream) {
        Some(context) => of_context(process, context, false),
        None => current(process),
    }
}

#[inline]
fn of_context(process: &'static Process, context: CUcontext, is_current: bool) -> Look {
    let handle = context.addr();
    let owner = ptr::from_ref(process).addr();
    let epoch = process.contexts.epoch();
    let cache = &own::thread().place;
    let cached = cache.get();
    if cached.handle == handle && cached.epoch == epoch && cached.owner == owner {
        return Look::At(cached.place);
    }
    let place = match process.contexts.find(handle) {
        Some(place) => place,
        None if is_current => match adopt(process, context) {
            Look::At(place) => place,
            other => return other,
        },
        None => return current(process),
    };
    cache.set(CachedPlace { owner, epoch, handle, place });
    Look::At(place)
}

/// Charges the current context, which no hook saw being made: through `cuGetExportTable` or graphics
/// interoperation. A green context's is noted at the place of the primary context, which is charged.
#[cold]
fn adopt(process: &'static Process, context: CUcontext) -> Look {
    let Some(device) = current_device() else { return Look::Nowhere };
    let Some(gpu) = process.listed(device) else {
        // There is a context, but on a GPU that is unknown: as if the page did not name it.
        return Look::At(Place { serial: 0, gpu: None });
    };
    let _one_at_a_time = primary_lock(process, device);
    if let Some(place) = process.contexts.find(context.addr()) {
        return Look::At(place);
    }
    if !is_view() {
        return note(process, context, device, gpu);
    }
    let Some(base) = primary(device) else { return Look::Nowhere };
    let place = match process.contexts.find(base.addr()) {
        Some(place) => place,
        None => match note(process, base, device, gpu) {
            Look::At(place) => place,
            other => return other,
        },
    };
    if process.contexts.make_room().is_err() {
        return Look::Unnoted(gpu);
    }
    remember(process, Context { is_view: true, ..Context::new(context.addr(), place) });
    Look::At(place)
}

/// Whether the current context is a green context's: so its default stream's is.
fn is_view() -> bool {
    // SAFETY: the default stream of the current context, and a valid place for a handle.
    let green = real::cuStreamGetGreenCtx
        .ask(ptr::null_mut(), |ask, green| unsafe { ask(ptr::null_mut(), green) });
    green.is_ok_and(|green| !green.is_null())
}

/// Charges a context of a listed device, and remembers it.
fn note(process: &'static Process, context: CUcontext, device: CUdevice, gpu: Option<u8>) -> Look {
    if process.contexts.make_room().is_err() {
        return Look::Unnoted(gpu);
    }
    let mut noted = Context::new(context.addr(), Place { serial: 0, gpu });
    noted.primary_of = (primary(device) == Some(context)).then_some(device);
    if let Some(gpu) = gpu {
        noted.overhead_bytes = process.account.shares().context_overhead(usize::from(gpu));
        match quota::reserve(process, gpu, noted.overhead_bytes) {
            // What was reserved, which never fails.
            Ok(overhead) => _ = overhead.commit(noted.overhead_bytes, Kind::Overhead),
            Err(refused) => return Look::Refused(refused),
        }
    }
    Look::At(remember(process, noted).place)
}

/// The primary context's handle while it is active, which only a retain tells; an active one's retain
/// and release change nothing.
pub(crate) fn primary(device: CUdevice) -> Option<CUcontext> {
    let release = real::cuDevicePrimaryCtxRelease_v2
        .get()
        .or_else(|| real::cuDevicePrimaryCtxRelease.get())?;
    if !primary_is_active(device) {
        return None;
    }
    // SAFETY: a valid place for a handle.
    let primary = real::cuDevicePrimaryCtxRetain
        .ask(ptr::null_mut(), |retain, primary| unsafe { retain(primary, device) })
        .ok()?;
    // SAFETY: it was retained.
    unsafe { release(device) };
    Some(primary)
}

pub(crate) fn primary_is_active(device: CUdevice) -> bool {
    let mut flags = 0;
    // SAFETY: valid places for both answers.
    let active = real::cuDevicePrimaryCtxGetState
        .ask(0, |ask, active| unsafe { ask(device, &raw mut flags, active) });
    active.is_ok_and(|active| active != 0)
}

#[inline]
pub(crate) fn current_context() -> Option<CUcontext> {
    // SAFETY: a valid place for a handle.
    let context =
        real::cuCtxGetCurrent.ask(ptr::null_mut(), |ask, context| unsafe { ask(context) });
    context.ok().filter(|context| !context.is_null())
}

/// The context of a stream that is not a default one, which is the current one's.
pub(crate) fn context_of(stream: Stream) -> Option<CUcontext> {
    if stream.is_default() {
        return None;
    }
    // SAFETY: the caller's stream, and a valid place for a handle. Allowed while capturing.
    let context = real::cuStreamGetCtx
        .ask(ptr::null_mut(), |ask, context| unsafe { ask(stream.handle(), context) });
    context.ok().filter(|context| !context.is_null())
}

pub(crate) fn current_device() -> Option<CUdevice> {
    // SAFETY: a valid place for a device.
    real::cuCtxGetDevice.ask(0, |ask, device| unsafe { ask(device) }).ok()
}

pub(crate) fn device_of(context: CUcontext) -> Option<CUdevice> {
    let _pushed = Pushed::new(context)?;
    current_device()
}

/// While it lives, a context is this thread's current one. Says whether it was not so before.
pub(crate) struct Pushed(bool);

impl Pushed {
    /// `None` for null, and when the driver refuses: the one before stays.
    pub(crate) fn new(context: CUcontext) -> Option<Self> {
        if context.is_null() {
            return None;
        }
        if current_context() == Some(context) {
            return Some(Self(false));
        }
        let push = real::cuCtxPushCurrent_v2.get()?;
        // SAFETY: a context that the driver or the application has named, and that no hook has seen end.
        (unsafe { push(context) } == CUDA_SUCCESS).then_some(Self(true))
    }
}

impl Drop for Pushed {
    fn drop(&mut self) {
        if self.0 {
            // SAFETY: what was pushed, and a valid place for a handle.
            let _ = real::cuCtxPopCurrent_v2.ask(ptr::null_mut(), |pop, top| unsafe { pop(top) });
        }
    }
}

// Which entry of the quota page a device is. Matched by UUID, never by ordinal:
// `CUDA_VISIBLE_DEVICES` renumbers devices.

/// Devices remembered; others are looked up each time.
const DEVICES: usize = 64;
const UNKNOWN: u8 = 0;
/// Asked: the page does not name it.
const UNLISTED: u8 = 1;
/// Entry 0 of the page; entry n is `FIRST + n`.
const FIRST: u8 = 2;

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
