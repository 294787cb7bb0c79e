//! MIG instances: which GPU they are of, how the configuration names them.

use tessera_model::mig::MigInstance;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::silent::{Asked, Unanswered};
use tessera_model::gpu::Gpu;
use tessera_model::replica;

/// Whether a GPU is in MIG mode.
pub(super) fn is_on(device: &Device<'_>) -> Result<bool, Unanswered> {
    match device.mig_mode() {
        Ok(mode) => Ok(mode.current == 1),
        // Of GPUs and drivers before MIG. Instances are in the way of that.
        Err(error @ (NvmlError::NotSupported | NvmlError::FailedToLoadSymbol(_))) => {
            match device.mig_device_count() {
                Ok(1..) => Err(Unanswered { asked: "MIG mode", error }),
                _ => Ok(false),
            }
        }
        Err(error) => Err(Unanswered { asked: "MIG mode", error }),
    }
}

/// An instance, and its device if NVML tells what sells it.
type Found<'n> = (MigInstance, Result<Device<'n>, Unanswered>);

/// The instances of a GPU in MIG mode, or why nothing of it can be sold.
pub(super) fn instances<'n>(
    nvml: &'n Nvml,
    device: &Device<'n>,
    whole: &Gpu,
) -> Result<Result<Vec<Found<'n>>, String>, Unanswered> {
    let mut found = Vec::new();
    for index in 0..device.mig_device_count().asked("number of MIG instances")? {
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
                found.push((instance, Err(Unanswered { asked: "handle", error })));
                continue;
            }
        };
        match tessera_nvml::instance_ids(nvml, &mig).asked("instance ids") {
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
pub(super) fn sharers<'g>(gpu: &Gpu, gpus: impl Iterator<Item = &'g Gpu>) -> u64 {
    let Some(mig) = &gpu.mig else { return 1 };
    let instance = |of: &MigInstance| (of.parent_index, of.gpu_instance);
    let shares = |other: &MigInstance| instance(other) == instance(mig);
    gpus.filter(|other| other.mig.as_ref().is_some_and(shares)).map(|_| 1).sum::<u64>().max(1)
}

#[cfg(test)]
mod tests {
    use super::super::selected;
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
}
