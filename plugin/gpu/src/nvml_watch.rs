//! Watches GPUs through NVML: one thread waits for events, another probes each GPU
//! periodically. When the driver or a GPU is gone, the library is initialised again.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::event::EventSet;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id;
use nvml_wrapper::{Device, Nvml};
use tracing::{debug, info, warn};

use super::health::{Condition, Observation, Silence};
use super::nvml::NvmlDiscovery;
use super::{Discovery, DiscoveryError};
use tessera_model::gpu::Gpu;
use tessera_system::locks::lock;

/// How long one wait for events lasts; also how fast the end is noticed.
const WAIT: Duration = Duration::from_secs(1);
/// A probe that takes longer says the same as one that fails.
const HANGS: Duration = Duration::from_secs(30);
/// Most rounds of probes between two attempts to bring a missing GPU back by a new initialisation,
/// which loses events that happen meanwhile.
const RELOAD_ROUNDS: u32 = 32;

/// What NVML says where the number is not known.
const UNKNOWN_XID: u64 = 999;

type Sink<'a> = &'a (dyn Fn(Observation) + Sync);

struct Watch<'a> {
    discovery: &'a NvmlDiscovery,
    gpus: &'a [Gpu],
    stop: &'a (dyn Fn() -> bool + Sync),
    sink: Sink<'a>,
    /// Counts initialisations of the library; a holder of an older one releases it.
    epoch: AtomicU64,
    /// An event calls for a probe now.
    alarm: (Mutex<bool>, Condvar),
    asking: Mutex<Option<(usize, Instant)>>,
}

pub(super) fn watch(
    discovery: &NvmlDiscovery,
    gpus: &[Gpu],
    interval: Duration,
    stop: &(dyn Fn() -> bool + Sync),
    sink: Sink<'_>,
) -> Result<(), String> {
    let watch = Watch {
        discovery,
        gpus,
        stop,
        sink,
        epoch: AtomicU64::new(0),
        alarm: (Mutex::new(false), Condvar::new()),
        asking: Mutex::new(None),
    };
    thread::scope(|scope| {
        let prober = thread::Builder::new().name("probe".into()).stack_size(256 << 10);
        prober
            .spawn_scoped(scope, || watch.probes(interval))
            .map_err(|error| format!("no thread: {error}"))?;
        watch.events(interval);
        Ok(())
    })
}

impl Watch<'_> {
    fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    fn alarm(&self) {
        *lock(&self.alarm.0) = true;
        self.alarm.1.notify_all();
    }

    // === events ===

    fn events(&self, interval: Duration) {
        let mut reported = BTreeSet::new();
        while !(self.stop)() {
            let epoch = self.epoch();
            // Probes tell that the driver is away.
            let Ok(nvml) = self.discovery.nvml() else {
                thread::sleep(WAIT);
                continue;
            };
            let (mut events, mut is_whole) = subscribe(&nvml, self.gpus, &mut reported);
            let mut asked = Instant::now();
            while !(self.stop)() && self.epoch() == epoch {
                self.next_event(&nvml, events.as_ref());
                self.report_hanging();
                if !is_whole && asked.elapsed() >= interval {
                    (events, is_whole) = subscribe(&nvml, self.gpus, &mut reported);
                    asked = Instant::now();
                }
            }
        }
    }

    fn next_event<'n>(&self, nvml: &'n Nvml, events: Option<&Subscription<'n>>) {
        let wait = u32::try_from(WAIT.as_millis()).unwrap_or(u32::MAX);
        let Some(Subscription { set, devices }) = events else {
            thread::sleep(WAIT);
            return;
        };
        match tessera_nvml::wait(nvml, set, wait) {
            Ok(event) => {
                let Some(event) = event.filter(|event| event.xid != UNKNOWN_XID) else { return };
                let identity = tessera_nvml::identity(&event.device);
                let Some(device) = whose(event.device.uuid().ok(), identity, devices) else {
                    warn!(xid = event.xid, "an XID of a GPU that does not say which; probes will");
                    self.alarm();
                    return;
                };
                for gpu in concerned(self.gpus, &device, event.gpu_instance) {
                    let uuid = gpu.uuid.clone();
                    (self.sink)(Observation::Xid { uuid, xid: event.xid });
                }
                // It may have changed what the GPU says of itself.
                self.alarm();
            }
            Err(NvmlError::Timeout) => {}
            Err(error) => {
                // Most likely a lost GPU: the probes say which. Not in a spin.
                debug!(%error, "waiting for events");
                self.alarm();
                thread::sleep(WAIT);
            }
        }
    }

    /// A driver in trouble may not return at all.
    fn report_hanging(&self) {
        let mut asking = lock(&self.asking);
        if let Some((index, since)) = *asking
            && since.elapsed() >= HANGS
        {
            *asking = Some((index, Instant::now()));
            let why = format!("no answer within {} s", HANGS.as_secs());
            let answer = Err(Silence { why, gone: false });
            (self.sink)(Observation::Probe { uuid: self.gpus[index].uuid.clone(), answer });
        }
    }

    // === probes ===

    fn probes(&self, interval: Duration) {
        let (mut waited, mut patience) = (0, 1);
        let mut silent = BTreeSet::new();
        while !(self.stop)() {
            let before = silent.clone();
            let round = self.round(&mut silent);
            if before.iter().any(|gpu| !silent.contains(gpu)) {
                // It may have been silent at the subscription, too: its events are subscribed to again.
                self.epoch.fetch_add(1, Ordering::AcqRel);
            }
            match round {
                Round::AllAnswer => (waited, patience) = (0, 1),
                Round::DriverAway => self.reload(),
                Round::SomeGone => {
                    waited += 1;
                    if waited >= patience {
                        (waited, patience) = (0, (patience * 2).min(RELOAD_ROUNDS));
                        self.reload();
                    }
                }
            }
            self.pause(interval);
        }
    }

    /// Until the next round is due, an event calls for it, or the end comes.
    fn pause(&self, interval: Duration) {
        let start = Instant::now();
        // A flood of events must not make a flood of probes.
        let least = interval.min(WAIT);
        let mut alarm = lock(&self.alarm.0);
        while !(self.stop)() {
            let waited = start.elapsed();
            if waited >= interval || (*alarm && waited >= least) {
                break;
            }
            let left = if *alarm { least - waited } else { interval - waited };
            let step = self.alarm.1.wait_timeout(alarm, left.min(WAIT));
            alarm = step.unwrap_or_else(PoisonError::into_inner).0;
        }
        *alarm = false;
    }

    /// Asks each GPU. Notes those that are `silent`.
    fn round(&self, silent: &mut BTreeSet<String>) -> Round {
        let nvml = match self.discovery.nvml() {
            Ok(nvml) => nvml,
            Err(error) => {
                let why = match error {
                    DiscoveryError::Nvml(why) => why,
                    other => other.to_string(),
                };
                (self.sink)(Observation::Driver(Silence { why, gone: true }));
                return Round::DriverAway;
            }
        };
        let mut silences = Vec::new();
        for (index, gpu) in self.gpus.iter().enumerate() {
            let set = |asking| *lock(&self.asking) = asking;
            set(Some((index, Instant::now())));
            let answer = nvml
                .device_by_uuid(&*gpu.uuid)
                .and_then(|device| device.memory_info())
                // What ails a GPU ails its instances.
                .and_then(|_| match &gpu.mig {
                    None => nvml.device_by_uuid(&*gpu.uuid),
                    Some(mig) => nvml.device_by_uuid(&*mig.parent_uuid),
                })
                .map(|device| condition(&device));
            set(None);
            let uuid = gpu.uuid.clone();
            match answer {
                Ok(condition) => {
                    (self.sink)(Observation::Probe { uuid: uuid.clone(), answer: Ok(()) });
                    if condition != Condition::default() {
                        (self.sink)(Observation::Condition { uuid, condition });
                    }
                }
                Err(error) => silences.push((uuid, error)),
            }
        }
        *silent = silences.iter().map(|(uuid, _)| uuid.clone()).collect();
        if let Some(error) = driver_away(&silences, self.gpus.len()) {
            let why = error.to_string();
            // What this initialisation knew is gone; the next one finds GPUs that were set up again.
            (self.sink)(Observation::Driver(Silence { why, gone: true }));
            return Round::DriverAway;
        }
        // What is left out because it is lost, a new initialisation may find as well.
        let left_out = self.discovery.silent().iter().any(|gpu| gpu.lost);
        let mut round = if left_out { Round::SomeGone } else { Round::AllAnswer };
        for (uuid, error) in silences {
            let gone = matches!(error, NvmlError::GpuLost | NvmlError::NotFound);
            if gone {
                round = Round::SomeGone;
            }
            let answer = Err(Silence { why: error.to_string(), gone });
            (self.sink)(Observation::Probe { uuid, answer });
        }
        round
    }

    fn reload(&self) {
        let used = self.discovery.forget();
        self.epoch.fetch_add(1, Ordering::AcqRel);
        let start = Instant::now();
        while used.strong_count() > 0 && start.elapsed() < 3 * WAIT && !(self.stop)() {
            thread::sleep(Duration::from_millis(20));
        }
        if used.strong_count() > 0 {
            // A call that hangs holds it. The next attempt may have more luck.
            info!("NVML is still in use; it is initialised again later");
        }
    }
}

enum Round {
    AllAnswer,
    SomeGone,
    DriverAway,
}

/// What says that the driver is away, and not one GPU alone: it says so itself, or no GPU gives any other
/// answer than that something is wrong. A GPU that is lost speaks for itself, and the driver with it.
fn driver_away(silences: &[(String, NvmlError)], gpus: usize) -> Option<&NvmlError> {
    use NvmlError::{DriverNotLoaded, LibRmVersionMismatch, Uninitialized, Unknown};
    let says_so = |error: &&NvmlError| {
        matches!(error, DriverNotLoaded | LibRmVersionMismatch | Uninitialized)
    };
    let mut errors = silences.iter().map(|(_, error)| error);
    let all_unknown = silences.len() == gpus && errors.clone().all(|e| matches!(e, Unknown));
    let first = silences.first().map(|(_, error)| error).filter(|_| all_unknown);
    errors.find(says_so).or(first)
}

struct Subscription<'n> {
    set: EventSet<'n>,
    /// The whole GPUs that they are of: [`tessera_nvml::identity`] and UUID. One that is lost answers no
    /// question, not even who it is.
    devices: Vec<(usize, String)>,
}

/// The UUID of the GPU that an event is of: as it says itself, else as it said at the subscription.
fn whose(said: Option<String>, identity: usize, devices: &[(usize, String)]) -> Option<String> {
    let known = || devices.iter().find(|(known, _)| *known == identity);
    said.or_else(|| known().map(|(_, uuid)| uuid.clone()))
}

/// XID events of every GPU that has them; `None` if none has. Those without are reported once. And whether all have them
/// that ever will, as far as NVML says.
fn subscribe<'n>(
    nvml: &'n Nvml,
    gpus: &[Gpu],
    reported: &mut BTreeSet<String>,
) -> (Option<Subscription<'n>>, bool) {
    let mut devices: Vec<(&Gpu, Device<'n>)> = Vec::new();
    for gpu in gpus {
        // Events of a MIG instance come from the whole GPU.
        let device = nvml.device_by_uuid(&*gpu.uuid).and_then(|device| {
            // Drivers before MIG do not know the question.
            if device.mig_is_mig_device_handle().unwrap_or(false) {
                device.mig_parent_device()
            } else {
                Ok(device)
            }
        });
        if let Ok(device) = device
            && !devices.iter().any(|(known, _)| known.pci_bus_id == gpu.pci_bus_id)
        {
            devices.push((gpu, device));
        }
    }
    let mut is_whole = true;
    let mut without = |gpu: &Gpu, why: NvmlError| {
        is_whole &= matches!(why, NvmlError::NotSupported);
        if reported.insert(gpu.uuid.clone()) {
            warn!(%gpu, %why, "NVML has no XID events for this GPU; only probes show its health");
        }
    };
    devices.retain(|(gpu, device)| {
        let why = match device.supported_event_types() {
            Ok(types) if types.contains(EventTypes::CRITICAL_XID_ERROR) => return true,
            Ok(_) => NvmlError::NotSupported,
            Err(error) => error,
        };
        without(gpu, why);
        false
    });
    // A failed registration takes the whole set with it: start again without that device.
    'again: while !devices.is_empty() {
        let Ok(mut set) = nvml.create_event_set() else { return (None, false) };
        for i in 0..devices.len() {
            set = match devices[i].1.register_events(EventTypes::CRITICAL_XID_ERROR, set) {
                Ok(set) => set,
                Err(error) => {
                    without(devices.remove(i).0, error.error);
                    continue 'again;
                }
            };
        }
        let of = |(gpu, device): &(&Gpu, Device<'_>)| {
            if reported.remove(&gpu.uuid) {
                info!(%gpu, "NVML has XID events for this GPU now");
            }
            let mig = gpu.mig.as_ref();
            let whole = mig.map_or_else(|| gpu.uuid.clone(), |mig| mig.parent_uuid.clone());
            (tessera_nvml::identity(device), whole)
        };
        let devices = devices.iter().map(of).collect();
        return (Some(Subscription { set, devices }), is_whole);
    }
    (None, is_whole)
}

/// Those of `gpus` that an event on `device` is about: the GPU itself; of one in MIG mode, what lies in the
/// GPU instance that it is attributed to, and all its instances where it is attributed to none.
fn concerned<'g>(
    gpus: &'g [Gpu],
    device: &str,
    gpu_instance: Option<u32>,
) -> impl Iterator<Item = &'g Gpu> {
    gpus.iter().filter(move |gpu| match &gpu.mig {
        None => gpu.uuid == device,
        Some(mig) => {
            mig.parent_uuid == device && gpu_instance.is_none_or(|id| id == mig.gpu_instance)
        }
    })
}

/// What NVML knows of the GPU's memory, and says it takes to repair it.
fn condition(device: &Device<'_>) -> Condition {
    let fields = [
        field_id::NVML_FI_DEV_ECC_DBE_VOL_TOTAL,
        field_id::NVML_FI_DEV_REMAPPED_FAILURE,
        field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
        field_id::NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
    ];
    let samples = device.field_values_for(&fields.map(FieldId)).unwrap_or_default();
    let value = |index: usize| {
        let sample = samples.get(index)?.as_ref().ok()?;
        match sample.value.as_ref().ok()? {
            SampleValue::U32(value) => Some(u64::from(*value)),
            SampleValue::U64(value) => Some(*value),
            SampleValue::I64(value) => u64::try_from(*value).ok(),
            SampleValue::F64(_) => None,
        }
    };
    Condition {
        uncorrectable: value(0),
        energy_mj: value(3),
        remap_failed: value(1).map(|failed| failed != 0),
        recovery: value(2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_model::mig::MigInstance;

    #[test]
    fn an_xid_of_a_lost_gpu_is_identified_by_its_handle() {
        let devices = [(16, "GPU-0".to_owned()), (32, "GPU-1".to_owned())];
        let name =
            |said: Option<&str>, identity| whose(said.map(str::to_owned), identity, &devices);
        assert_eq!(name(Some("GPU-1"), 32).as_deref(), Some("GPU-1"));
        assert_eq!(name(None, 32).as_deref(), Some("GPU-1"));
        assert_eq!(name(None, 48), None);
    }

    #[test]
    fn a_driver_is_away_if_it_says_so_or_every_gpu_is_silent_for_no_reason() {
        use NvmlError::{DriverNotLoaded, GpuLost, NotFound, Unknown};
        let away = |errors: Vec<NvmlError>| {
            let errors: Vec<_> = errors.into_iter().map(|e| (String::new(), e)).collect();
            driver_away(&errors, 2).is_some()
        };
        assert!(away(vec![Unknown, Unknown]) && away(vec![DriverNotLoaded]));
        assert!(away(vec![GpuLost, DriverNotLoaded]));
        assert!(!away(vec![]) && !away(vec![Unknown]), "another answers");
        assert!(!away(vec![GpuLost, Unknown]) && !away(vec![Unknown, GpuLost]));
        assert!(!away(vec![NotFound, NotFound]));
    }

    #[test]
    fn an_xid_concerns_the_instance_it_is_attributed_to_or_all_of_the_gpu() {
        let instance = |gpu: u32, gpu_instance, compute_instance| Gpu {
            mig: Some(MigInstance {
                parent_uuid: format!("GPU-{gpu}"),
                parent_index: gpu,
                index: 0,
                gpu_instance,
                compute_instance,
            }),
            ..Gpu::example(&format!("MIG-{gpu}-{gpu_instance}-{compute_instance}"), gpu)
        };
        let gpus = [
            Gpu::example("GPU-0", 0),
            instance(1, 7, 0),
            instance(1, 2, 0),
            instance(1, 2, 1),
            instance(2, 7, 0),
        ];
        let named = |device: &str, gi| {
            concerned(&gpus, device, gi).map(|gpu| gpu.uuid.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(named("GPU-0", None), ["GPU-0"]);
        assert_eq!(named("GPU-1", Some(7)), ["MIG-1-7-0"]);
        assert_eq!(named("GPU-1", Some(2)), ["MIG-1-2-0", "MIG-1-2-1"], "they share its memory");
        assert_eq!(named("GPU-1", None), ["MIG-1-7-0", "MIG-1-2-0", "MIG-1-2-1"]);
        assert!(named("GPU-3", None).is_empty());
    }
}
