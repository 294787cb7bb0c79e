//! Lists the GPUs that are wanted. Each is asked for its names first, then it is decided whether it is wanted, and
//! what is gets the other questions. One that does not answer leaves itself out, and no other.

use std::path::Path;

use nvml_wrapper::enum_wrappers::device::GpuVirtualizationMode;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::silent::{Asked, MEMORY, SilentGpu, Unanswered};
use super::{absent, context, mig, pci, selected};
use tessera_config as config;
use tessera_model::gpu::Gpu;

/// Where the kernel tells a PCI device's NUMA node.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// What a machine has.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Whole GPUs, and the instances of those in MIG mode, as the configuration wants them.
    pub gpus: Vec<Gpu>,
    /// All that told their names.
    pub all: Vec<Gpu>,
    /// See [`super::Discovery::unsold`].
    pub unsold: Vec<String>,
    /// What the configuration names and this machine does not have. One configuration often serves many
    /// nodes, so this is no error; but it may be a mistake.
    pub absent: Vec<String>,
    /// See [`super::Discovery::silent`].
    pub silent: Vec<SilentGpu>,
}

/// Lists them.
///
/// # Errors
/// NVML does not say how many there are.
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
    let sharers: Vec<u64> = found.gpus.iter().map(|gpu| mig::sharers(gpu, with_memory())).collect();
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
        let device = match nvml.device_by_index(index).asked("handle") {
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
        match mig::is_on(&device) {
            Err(why) => self.leave_out(&whole, &why),
            Ok(true) => self.instances(nvml, &device, &whole, capability, wanted),
            Ok(false) if selected(&whole, &wanted.include, &wanted.exclude) => {
                whole.context_bytes = context::bytes_of(&device, false, capability);
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
        capability: Option<context::Capability>,
        wanted: &config::Gpus,
    ) {
        self.all.push(whole.clone());
        let is_wanted = |gpu: &Gpu| selected(gpu, &wanted.include, &wanted.exclude);
        let instances = match mig::instances(nvml, device, whole) {
            Err(why) => return self.leave_out(whole, &why),
            Ok(Err(why)) => {
                self.unsold.extend(is_wanted(whole).then_some(why));
                return;
            }
            Ok(Ok(instances)) => instances,
        };
        for (instance, answer) in instances {
            let nameless = Gpu { mig: Some(instance), ..nameless_of(whole) };
            let device = match answer {
                Ok(device) => device,
                Err(why) => {
                    self.leave_out(&nameless, &why);
                    continue;
                }
            };
            let (gpu, missing) = names(&device, Some(whole), whole.index);
            let mut gpu = Gpu { mig: nameless.mig, ..gpu };
            match missing {
                Some(why) => self.leave_out(&gpu, &why),
                None if is_wanted(&gpu) => {
                    gpu.context_bytes = context::bytes_of(&device, true, capability);
                    self.take(&device, gpu, Some(whole));
                }
                None => self.all.push(gpu),
            }
        }
    }

    /// Asks for what is sold of a GPU that is wanted.
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
    Gpu {
        uuid: String::new(),
        index,
        minor: index,
        name: String::new(),
        pci_bus_id: String::new(),
        numa_node: None,
        memory_bytes: 0,
        driver_bytes: 0,
        context_bytes: None,
        context_measured_bytes: None,
        mig: None,
    }
}

/// An instance of this GPU of which no name is known.
fn nameless_of(whole: &Gpu) -> Gpu {
    let Gpu { minor, pci_bus_id, numa_node, .. } = whole.clone();
    Gpu { minor, pci_bus_id, numa_node, ..nameless(whole.index) }
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
    let address = device.pci_info().map(|pci| pci.bus_id).asked("PCI address");
    let pci_bus_id = known(match parent {
        Some(parent) => address.or_else(|_| Ok(parent.pci_bus_id.clone())),
        None => address,
    });
    let uuid = known(device.uuid().asked("UUID"));
    let name = known(device.name().asked("name"));
    (Gpu { uuid, name, pci_bus_id, ..nameless(index) }, missing)
}

/// A device of which the names are known, with all that is sold of it.
fn describe(device: &Device<'_>, gpu: Gpu, parent: Option<&Gpu>) -> Result<Gpu, Unanswered> {
    let numa_node = pci::numa_node(Path::new(PCI_DEVICES), &gpu.pci_bus_id)
        .or_else(|| device.numa_node_id().ok())
        .or_else(|| parent.and_then(|gpu| gpu.numa_node));
    let minor = match (device.minor_number(), parent) {
        (Ok(minor), _) => minor,
        (Err(_), Some(parent)) => parent.minor,
        // Where nothing is known of minor numbers they are the indexes. Else another GPU's device node might be
        // given to a container.
        (Err(NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_)), None) => gpu.index,
        (Err(error), None) => return Err(Unanswered { asked: "minor number", error }),
    };
    let memory = device.memory_info().asked(MEMORY)?;
    let (memory_bytes, driver_bytes) = (memory.total, memory.reserved);
    Ok(Gpu { minor, numa_node, memory_bytes, driver_bytes, ..gpu })
}
