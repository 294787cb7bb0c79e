//! Lists the GPUs that are wanted. Each is asked for its names first, then it is decided whether it is wanted, and
//! what is gets the other questions. One that does not answer leaves itself out, and no other.

use std::fmt;
use std::path::Path;

use nvml_wrapper::enum_wrappers::device::GpuVirtualizationMode;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use tessera_config as config;
use tessera_model::gpu::Gpu;
use tessera_model::mig::MigInstance;
use tessera_model::replica;

use super::nvml_near::numa_node;
use super::{absent, selected};

const PCI_DEVICES: &str = "/sys/bus/pci/devices";

#[derive(Debug, Default)]
pub(super) struct Found {
    /// Whole GPUs, and the instances of those in MIG mode, as the configuration wants them.
    pub gpus: Vec<Gpu>,
    pub all: Vec<Gpu>,
    /// See [`super::Discovery::unsold`].
    pub unsold: Vec<String>,
    /// What the configuration names and this machine does not have. One configuration often serves many
    /// nodes, so this is no error; but it may be a mistake.
    pub absent: Vec<String>,
    /// See [`super::Discovery::silent`].
    pub silent: Vec<SilentGpu>,
}

pub(super) fn list(nvml: &Nvml, wanted: &config::Gpus) -> Result<Found, NvmlError> {
    let mut found = Found::default();
    for index in 0..nvml.device_count()? {
        found.look_at(nvml, index, wanted);
    }
    let known: Vec<&Gpu> = found.all.iter().collect();
    let (include, exclude) = (&wanted.include, &wanted.exclude);
    // What names nothing here may name one that does not say its names.
    if found.silent.iter().all(SilentGpu::has_names) {
        let silent = found.silent.iter().map(|silent| &silent.gpu);
        let here: Vec<&Gpu> = known.iter().copied().chain(silent).collect();
        let lists = [("gpus.include", include), ("gpus.exclude", exclude)];
        found.absent = lists.into_iter().flat_map(|(key, list)| absent(key, list, &here)).collect();
    }
    found.silent.retain(|silent| may_be_wanted(silent, wanted, &known));
    // Sold twice, memory in common would be oversold.
    let with_memory = || found.gpus.iter().chain(found.silent.iter().map(|silent| &silent.gpu));
    let sharers: Vec<u64> = found.gpus.iter().map(|gpu| sharers(gpu, with_memory())).collect();
    for (gpu, sharers) in found.gpus.iter_mut().zip(sharers) {
        gpu.memory_bytes /= sharers;
        gpu.driver_bytes /= sharers;
    }
    Ok(found)
}

/// Whether the configuration may mean this GPU, as far as its names are known: what is in the list and names no
/// other may name it.
fn may_be_wanted(silent: &SilentGpu, wanted: &config::Gpus, known: &[&Gpu]) -> bool {
    let gpu = &silent.gpu;
    let names_another = |entry: &String| known.iter().any(|known| known.is_named(entry));
    let includes =
        |entry: &String| gpu.is_named(entry) || !silent.has_names() && !names_another(entry);
    wanted.include.iter().any(includes) && !wanted.exclude.iter().any(|entry| gpu.is_named(entry))
}

impl Found {
    fn look_at(&mut self, nvml: &Nvml, index: u32, wanted: &config::Gpus) {
        let device = match nvml.device_by_index(index).map_err(asked("handle")) {
            Ok(device) => device,
            Err(why) => return self.leave_out(&nameless(index), &why),
        };
        let (mut whole, nameless) = names(&device, None, index);
        let is_excluded = wanted.exclude.iter().any(|entry| whole.is_named(entry));
        match nameless {
            Some(why) if !is_excluded => return self.leave_out(&whole, &why),
            None if !is_excluded => {}
            _ => return self.all.push(whole),
        }
        let is_virtual = matches!(device.virtualization_mode(), Ok(GpuVirtualizationMode::Vgpu));
        let names = |entry: &&String| whole.is_named(entry);
        if is_virtual && wanted.include.iter().filter(names).all(|entry| entry == "*") {
            let is_wanted = selected(&whole, &wanted.include, &wanted.exclude);
            self.unsold.extend(is_wanted.then(|| format!(
                "{whole} is a hypervisor's virtual GPU (vGPU), which divides the GPU's time in a way that nobody in \
                 the guest sees: it is not sold. Memory quotas hold on it, shares of GPU time do not; to sell it \
                 all the same name it in gpus.include"
            )));
            return self.all.push(whole);
        }
        // An instance does not tell its GPU's capability.
        let capability = device.cuda_compute_capability().ok().map(|of| (of.major, of.minor));
        match is_mig_on(&device) {
            Err(why) => self.leave_out(&whole, &why),
            Ok(true) => self.instances(nvml, &device, &whole, capability, wanted),
            Ok(false) if selected(&whole, &wanted.include, &wanted.exclude) => {
                whole.context_bytes = context_bytes(&device, false, capability);
                self.take(&device, whole, None);
            }
            Ok(false) => self.all.push(whole),
        }
    }

    fn instances(
        &mut self,
        nvml: &Nvml,
        device: &Device<'_>,
        whole: &Gpu,
        capability: Option<Capability>,
        wanted: &config::Gpus,
    ) {
        self.all.push(whole.clone());
        let is_wanted = |gpu: &Gpu| selected(gpu, &wanted.include, &wanted.exclude);
        let instances = match instances(nvml, device, whole) {
            Err(why) => return self.leave_out(whole, &why),
            Ok(Err(why)) => {
                self.unsold.extend(is_wanted(whole).then_some(why));
                return;
            }
            Ok(Ok(instances)) => instances,
        };
        for (instance, answer) in instances {
            let mig = Some(instance);
            let device = match answer {
                Ok(device) => device,
                Err(why) => {
                    let Gpu { index, minor, pci_bus_id, numa_node, .. } = whole.clone();
                    let known = Gpu { index, minor, pci_bus_id, numa_node, mig, ..Gpu::default() };
                    self.leave_out(&known, &why);
                    continue;
                }
            };
            let (gpu, missing) = names(&device, Some(whole), whole.index);
            let mut gpu = Gpu { mig, ..gpu };
            match missing {
                Some(why) => self.leave_out(&gpu, &why),
                None if is_wanted(&gpu) => {
                    gpu.context_bytes = context_bytes(&device, true, capability);
                    self.take(&device, gpu, Some(whole));
                }
                None => self.all.push(gpu),
            }
        }
    }

    fn take(&mut self, device: &Device<'_>, gpu: Gpu, parent: Option<&Gpu>) {
        match describe(device, gpu.clone(), parent) {
            Ok(gpu) => {
                self.all.push(gpu.clone());
                self.gpus.push(gpu);
            }
            Err(why) => self.leave_out(&gpu, &why),
        }
    }

    fn leave_out(&mut self, gpu: &Gpu, why: &Unanswered) {
        self.silent.push(SilentGpu::new(gpu, why));
    }
}

fn nameless(index: u32) -> Gpu {
    Gpu { index, minor: index, ..Gpu::default() }
}

/// A device's names, and the first question for one that had no answer. An instance has its GPU's PCI address.
fn names(device: &Device<'_>, parent: Option<&Gpu>, index: u32) -> (Gpu, Option<Unanswered>) {
    let mut missing = None;
    let mut known = |answer: Result<String, Unanswered>| {
        answer.unwrap_or_else(|why| {
            missing.get_or_insert(why);
            String::new()
        })
    };
    let address = device.pci_info().map(|pci| pci.bus_id).map_err(asked("PCI address"));
    let pci_bus_id = known(match parent {
        Some(parent) => address.or_else(|_| Ok(parent.pci_bus_id.clone())),
        None => address,
    });
    let uuid = known(device.uuid().map_err(asked("UUID")));
    let name = known(device.name().map_err(asked("name")));
    (Gpu { uuid, name, pci_bus_id, ..nameless(index) }, missing)
}

/// A device of which the names are known, with all that is sold of it.
fn describe(device: &Device<'_>, gpu: Gpu, parent: Option<&Gpu>) -> Result<Gpu, Unanswered> {
    let numa_node = numa_node(Path::new(PCI_DEVICES), &gpu.pci_bus_id)
        .or_else(|| device.numa_node_id().ok())
        .or_else(|| parent.and_then(|gpu| gpu.numa_node));
    let minor = match (device.minor_number(), parent) {
        (Ok(minor), _) => minor,
        (Err(_), Some(parent)) => parent.minor,
        // Where nothing is known of minor numbers they are the indexes. Else another GPU's device node might be
        // given to a container.
        (Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)), None) => gpu.index,
        (Err(error), None) => return Err(asked("minor number")(error)),
    };
    let memory = device.memory_info().map_err(asked(MEMORY))?;
    let (memory_bytes, driver_bytes) = (memory.total, memory.reserved);
    Ok(Gpu { minor, numa_node, memory_bytes, driver_bytes, ..gpu })
}

fn is_mig_on(device: &Device<'_>) -> Result<bool, Unanswered> {
    match device.mig_mode() {
        Ok(mode) => Ok(mode.current == 1),
        // Of GPUs and drivers before MIG. Instances are in the way of that.
        Err(error @ (NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_))) => {
            match device.mig_device_count() {
                Ok(1..) => Err(asked("MIG mode")(error)),
                _ => Ok(false),
            }
        }
        Err(error) => Err(asked("MIG mode")(error)),
    }
}

/// An instance, and its device if NVML tells what sells it.
type Instance<'n> = (MigInstance, Result<Device<'n>, Unanswered>);

/// The instances of a GPU in MIG mode, or why nothing of it can be sold.
fn instances<'n>(
    nvml: &'n Nvml,
    device: &Device<'n>,
    whole: &Gpu,
) -> Result<Result<Vec<Instance<'n>>, String>, Unanswered> {
    let mut found = Vec::new();
    for index in 0..device.mig_device_count().map_err(asked("number of MIG instances"))? {
        let mut instance = MigInstance {
            parent_uuid: whole.uuid.clone(),
            parent_index: whole.index,
            index,
            // None that there is, until it is known.
            gpu_instance: u32::MAX - index,
            compute_instance: 0,
        };
        let mig = match device.mig_device_by_index(index) {
            Ok(mig) => mig,
            // As many as there could be; "if no valid MIG device was found at index".
            Err(NvmlError::NotFound | NvmlError::InvalidArg) => continue,
            Err(error) => {
                found.push((instance, Err(asked("handle")(error))));
                continue;
            }
        };
        match tessera_nvml::instance_ids(nvml, &mig).map_err(asked("instance ids")) {
            Ok(ids) => (instance.gpu_instance, instance.compute_instance) = ids,
            Err(why) => {
                found.push((instance, Err(why)));
                continue;
            }
        }
        if let Ok(uuid) = mig.uuid()
            && !replica::is_uuid(&uuid)
        {
            return Ok(Err(format!(
                "{whole} is in MIG mode and its driver names an instance {uuid:?}, which is no UUID: \
                 nothing of it is sold; drivers from 470.42.01 on give instances UUIDs"
            )));
        }
        found.push((instance, Ok(mig)));
    }
    if found.is_empty() {
        return Ok(Err(format!(
            "{whole} is in MIG mode and has no instances: nothing of it is sold; make some \
             (`nvidia-smi mig -cgi PROFILE -C`) or switch MIG off, and restart the plugin"
        )));
    }
    Ok(Ok(found))
}

/// How many of `gpus` have `gpu`'s memory in common, itself included: the compute instances of its GPU
/// instance, each of which NVML shows all of it.
fn sharers<'g>(gpu: &Gpu, gpus: impl Iterator<Item = &'g Gpu>) -> u64 {
    let Some(mig) = &gpu.mig else { return 1 };
    let instance = |of: &MigInstance| (of.parent_index, of.gpu_instance);
    let shares = |other: &MigInstance| instance(other) == instance(mig);
    gpus.filter(|other| other.mig.as_ref().is_some_and(shares)).map(|_| 1).sum::<u64>().max(1)
}

/// A GPU, or a MIG instance, that is left out because NVML did not answer a question about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SilentGpu {
    /// What is known of it: what NVML did not tell is empty or 0.
    pub gpu: Gpu,
    pub asked: &'static str,
    pub error: String,
    /// The driver calls it lost: a new initialisation of NVML may find it again.
    pub lost: bool,
}

impl SilentGpu {
    fn new(gpu: &Gpu, unanswered: &Unanswered) -> Self {
        SilentGpu {
            gpu: gpu.clone(),
            asked: unanswered.asked,
            error: match (&unanswered.error, unanswered.asked) {
                (NvmlError::NotSupported, MEMORY) => format!("{}{SHARED}", unanswered.error),
                (error, _) => error.to_string(),
            },
            lost: matches!(unanswered.error, NvmlError::GpuLost | NvmlError::NotFound),
        }
    }

    pub fn reason(&self) -> String {
        format!("NVML: {}, asked for its {}", self.error, self.asked)
    }

    pub fn unusable(&self) -> String {
        format!("{} cannot be used: {}", self.name(), self.reason())
    }

    fn name(&self) -> String {
        let names = [&self.gpu.name, &self.gpu.uuid, &self.gpu.pci_bus_id];
        let names: Vec<&str> =
            names.into_iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
        let name = match &self.gpu.mig {
            None => format!("GPU {}", self.gpu.index),
            Some(instance) => format!("GPU {instance}"),
        };
        if names.is_empty() { name } else { format!("{name} ({})", names.join(", ")) }
    }

    pub fn is(&self, gpu: &Gpu) -> bool {
        let number = |gpu: &Gpu| gpu.mig.as_ref().map(|mig| mig.index);
        // Of a GPU that does not say whether it is in MIG mode, every instance.
        self.gpu.index == gpu.index && (self.gpu.mig.is_none() || number(&self.gpu) == number(gpu))
    }

    fn has_names(&self) -> bool {
        [&self.gpu.uuid, &self.gpu.name, &self.gpu.pci_bus_id].iter().all(|name| !name.is_empty())
    }
}

impl fmt::Display for SilentGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.lost { "is lost and not sold" } else { "is not sold" };
        let (name, reason) = (self.name(), self.reason());
        write!(f, "{name} {how}: {reason}; it is asked again, and sold when it answers")
    }
}

const MEMORY: &str = "memory";
/// NVML answers so for good where CPU and GPU have one memory (DGX Spark User Guide, "Known Issues": "Memory-Usage: Not Supported").
const SHARED: &str = " (a GPU whose memory is also the CPU's, as Tegra's and GB10's, has no such figure, and cannot be shared)";

#[derive(Debug)]
struct Unanswered {
    asked: &'static str,
    error: NvmlError,
}

fn asked(asked: &'static str) -> impl FnOnce(NvmlError) -> Unanswered {
    move |error| Unanswered { asked, error }
}

/// A CUDA context keeps a stack for every thread that the GPU can have resident, of 1 KiB by default, and about 1.5 MiB for
/// each multiprocessor. So contexts of GPUs with 34, 82, 142 and 188 multiprocessors, all of 1,536 threads, were seen to
/// take 107, 256, 426 and 555 MiB: 3.0 to 3.1 MiB for each. What a driver's contexts take beyond it is observed.
const STACK_BYTES: u64 = 1 << 10;
const STATE_BYTES: u64 = 3 << 19;

type Capability = (i32, i32);

/// What a context takes of a device, or of an instance of a GPU of this `capability`; `None` where NVML
/// does not tell. NVML counts the cores of whole GPUs, and the multiprocessors of instances.
fn context_bytes(
    device: &Device<'_>,
    is_instance: bool,
    capability: Option<Capability>,
) -> Option<u64> {
    let capability = capability?;
    let multiprocessors = if is_instance {
        device.attributes().ok()?.multiprocessor_count
    } else {
        device.num_cores().ok()?.checked_div(cores_of_each(capability))?
    };
    (multiprocessors > 0).then(|| bytes(multiprocessors, capability))
}

fn bytes(multiprocessors: u32, capability: Capability) -> u64 {
    u64::from(multiprocessors) * (threads_of_each(capability) * STACK_BYTES + STATE_BYTES)
}

/// FP32 cores of a multiprocessor, which is what NVML counts: CUDA Programming Guide, "Arithmetic
/// Instructions".
fn cores_of_each(capability: Capability) -> u32 {
    match capability {
        (..=6, _) | (8, 6..) | (9.., _) => 128,
        _ => 64,
    }
}

/// Threads that a multiprocessor can have resident: CUDA Programming Guide, "Technical Specifications
/// per Compute Capability".
fn threads_of_each(capability: Capability) -> u64 {
    match capability {
        (7, 5) => 1024,
        (8, 6..) | (11.., _) => 1536,
        _ => 2048,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(gpu: u32, index: u32) -> Gpu {
        Gpu {
            mig: Some(MigInstance {
                parent_uuid: format!("GPU-{gpu}"),
                parent_index: gpu,
                index,
                gpu_instance: index + 7,
                compute_instance: 0,
            }),
            ..Gpu::example(&format!("MIG-{gpu}-{index}"), gpu)
        }
    }

    #[test]
    fn instances_are_chosen_by_their_gpu_or_one_by_one() {
        let gpu = instance(2, 1);
        let list = |entry: &str| [entry.to_owned()];
        for entry in ["*", "2", "2:1", "GPU-2", "MIG-2-1"] {
            assert!(selected(&gpu, &list(entry), &[]), "{entry}");
            assert!(!selected(&gpu, &list("*"), &list(entry)), "{entry}");
        }
        for entry in ["1", "2:0", "1:2", "2:", ":1", "2:1:0", "GPU-1", "MIG-2-0"] {
            assert!(!selected(&gpu, &list(entry), &[]), "{entry}");
        }
        assert!(
            !selected(&Gpu::example("GPU-2", 2), &list("2:1"), &[]),
            "a whole GPU is no instance"
        );
    }

    #[test]
    fn compute_instances_of_one_gpu_instance_share_its_memory() {
        let twin = |index| {
            let mut gpu = instance(0, index);
            gpu.mig.as_mut().unwrap().gpu_instance = 1;
            gpu
        };
        let all = [twin(0), twin(1), instance(0, 2), instance(1, 0), Gpu::example("GPU-2", 2)];
        let counts: Vec<_> = all.iter().map(|gpu| sharers(gpu, all.iter())).collect();
        assert_eq!(counts, [2, 2, 1, 1, 1]);
    }

    /// Multiprocessors, capability, and MiB as others saw or as is expected of the GPU.
    #[test]
    fn contexts_take_what_was_seen() {
        for (name, multiprocessors, capability, seen) in [
            ("RTX 4060 Ti", 34, (8, 9), 107),
            ("RTX 3090", 82, (8, 6), 256),
            ("RTX 6000 Ada", 142, (8, 9), 426),
            ("RTX PRO 6000", 188, (12, 0), 555),
            ("L4", 58, (8, 9), 175),
            ("A100", 108, (8, 0), 380),
            ("H100", 132, (9, 0), 460),
        ] {
            let bytes = bytes(multiprocessors, capability);
            let seen = seen << 20;
            assert!(bytes.abs_diff(seen) <= seen / 20, "{name}: {} MiB", bytes >> 20);
        }
    }

    #[test]
    fn cores_are_counted_by_architecture() {
        for (cores, capability, multiprocessors) in [
            (3840, (6, 1), 30),
            (5120, (7, 0), 80),
            (2560, (7, 5), 40),
            (6912, (8, 0), 108),
            (7424, (8, 9), 58),
            (16896, (9, 0), 132),
            (24064, (12, 0), 188),
        ] {
            assert_eq!(cores / cores_of_each(capability), multiprocessors, "{capability:?}");
        }
    }
}
