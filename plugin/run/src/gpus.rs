//! Which GPUs the command may use.

use anyhow::Context;

use tessera_config::{Config, Gpus};
use tessera_gpu::nvml::NvmlDiscovery;
use tessera_gpu::{Discovery, SilentGpu};
use tessera_model::gpu::Gpu;
use tessera_model::quantity::format_bytes;
use tessera_tenant::delivery::driver::nvml as nvml_library;

/// All GPUs of the machine that the configuration includes, and those of them that do not answer.
///
/// # Errors
/// No NVML, or what it answers; no GPU at all.
pub(super) fn list(config: &Config) -> anyhow::Result<(Vec<Gpu>, Vec<SilentGpu>)> {
    let discovery = NvmlDiscovery::new(nvml_library(config));
    let gpus = discovery
        .gpus(&config.gpus)
        .context("no GPU to hold the command on (--sim uses the simulated one instead)")?;
    Ok((gpus, discovery.silent()))
}

/// What the user calls a GPU: its index, and a MIG instance's after it.
fn label(gpu: &Gpu) -> String {
    gpu.mig.as_ref().map_or_else(|| gpu.index.to_string(), ToString::to_string)
}

/// `CUDA_VISIBLE_DEVICES` for the command; `None` where it is left as it is.
///
/// Where only some GPUs are the command's (`named`), CUDA shows it no others, whatever the variable said
/// before: a device that is none is what programs know how to deal with. By UUID, because ordinals depend
/// on `CUDA_DEVICE_ORDER`. Where all are, it takes the variable only to reach MIG instances, of which a
/// process sees no more than one, and no whole GPU beside it (MIG User Guide, "CUDA Device Enumeration");
/// then what the user says (`has_own`) goes first.
pub(super) fn visible(all: &[Gpu], chosen: &[Gpu], named: bool, has_own: bool) -> Option<String> {
    let has_instances = all.iter().any(|gpu| gpu.mig.is_some());
    let uuids: Vec<&str> = chosen.iter().map(|gpu| gpu.uuid.as_str()).collect();
    (named || has_instances && !has_own).then(|| uuids.join(","))
}

/// Whether the command is to have only some of the machine's GPUs: by `--gpu`, by the configuration, or because
/// one does not answer and so cannot be held.
pub(super) fn are_named(wanted: &[String], config: &Config, silent: &[SilentGpu]) -> bool {
    let Gpus { include, exclude, .. } = &config.gpus;
    !wanted.is_empty()
        || !silent.is_empty()
        || !exclude.is_empty()
        || !include.iter().any(|entry| entry == "*")
}

/// Those of `all` that `wanted` names by UUID or index, of MIG instances as `0:1`; all where it names none.
///
/// # Errors
/// A name that is no GPU's, with those there are.
pub(super) fn select(
    (all, silent): (&[Gpu], &[SilentGpu]),
    wanted: &[String],
) -> anyhow::Result<Vec<Gpu>> {
    if wanted.is_empty() {
        return Ok(all.to_vec());
    }
    let mut chosen: Vec<Gpu> = Vec::new();
    for name in wanted {
        let Some(gpu) = all.iter().find(|g| g.uuid == *name || label(g) == *name) else {
            let is_meant = |s: &&SilentGpu| {
                s.gpu.uuid == *name || label(&s.gpu) == *name || s.gpu.index.to_string() == *name
            };
            if let Some(silent) = silent.iter().find(is_meant) {
                anyhow::bail!("--gpu {name}: {}", silent.unusable());
            }
            let there: Vec<String> =
                all.iter().map(|g| format!("{} ({})", label(g), g.uuid)).collect();
            anyhow::bail!("--gpu {name}: no such GPU; there is {}", there.join(", "));
        };
        if !chosen.contains(gpu) {
            chosen.push(gpu.clone());
        }
    }
    Ok(chosen)
}

/// Whether `memory` makes sense on `gpu`.
///
/// # Errors
/// A quota that no context fits into, or that is larger than the GPU.
pub(super) fn check(gpu: &Gpu, memory: u64, overhead: u64) -> anyhow::Result<()> {
    anyhow::ensure!(
        memory > overhead,
        "--memory {} leaves nothing to use: a CUDA context alone is charged {} \
         (--context-overhead); give more",
        format_bytes(memory),
        format_bytes(overhead)
    );
    anyhow::ensure!(
        memory <= gpu.memory_bytes,
        "--memory {} is more than GPU {} ({}) has: {}",
        format_bytes(memory),
        label(gpu),
        gpu.name,
        format_bytes(gpu.memory_bytes)
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Vec<Gpu> {
        (0..2)
            .map(|index| Gpu {
                memory_bytes: 8 << 30,
                ..Gpu::example(&format!("GPU-{index:08}"), index)
            })
            .collect()
    }

    #[test]
    fn gpus_are_chosen_by_uuid_and_by_index() {
        let all = two();
        let of = |wanted: &[String]| select((&all, &[]), wanted).unwrap();
        assert_eq!(of(&[]), all);
        assert_eq!(of(&["1".into()]), all[1..]);
        assert_eq!(of(&["GPU-00000000".into(), "0".into()]), all[..1]);
    }

    #[test]
    fn an_instance_is_chosen_by_both_indexes_and_made_the_one_that_cuda_sees() {
        let instance = |index| Gpu {
            mig: Some(tessera_model::mig::MigInstance {
                parent_uuid: "GPU-00000000".into(),
                parent_index: 0,
                index,
                gpu_instance: index + 1,
                compute_instance: 0,
            }),
            ..Gpu::example(&format!("MIG-{index:08}"), 0)
        };
        let all = [instance(0), instance(1), two().remove(1)];
        let chosen = select((&all, &[]), &["0:1".into()]).unwrap();
        assert_eq!(chosen, all[1..2]);
        assert_eq!(visible(&all, &chosen, false, false).as_deref(), Some("MIG-00000001"));
        assert_eq!(visible(&all, &all[2..], false, false).as_deref(), Some("GPU-00000001"));
        assert_eq!(visible(&all, &all, false, true), None, "the user chose");
        assert_eq!(visible(&two(), &two(), false, false), None, "without MIG it is left as it is");
        assert!(
            select((&all, &[]), &["0".into()])
                .unwrap_err()
                .to_string()
                .contains("0:1 (MIG-00000001)")
        );
    }

    #[test]
    fn what_is_not_given_is_not_shown() {
        let all = two();
        for has_own in [false, true] {
            let shown = visible(&all, &all[1..], true, has_own);
            assert_eq!(shown.as_deref(), Some("GPU-00000001"));
        }
        let config = |text: &str| Config::parse(text).unwrap();
        assert!(!are_named(&[], &config(""), &[]));
        assert!(are_named(&["0".into()], &config(""), &[]));
        assert!(are_named(&[], &config("[gpus]\nexclude = [\"1\"]\n"), &[]));
        assert!(are_named(&[], &config("[gpus]\ninclude = [\"1\"]\n"), &[]));
    }
}
