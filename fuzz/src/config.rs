//! The configuration's text.

use tessera_config::Config;
use tessera_model::gpu::Gpu;
use tessera_rules::{capacity, shares};

/// Any text is a configuration or a list of problems, each with a place in the text. What a configuration
/// makes of a GPU is possible, or is a problem too.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Config::parse(text) {
        Ok(config) => {
            assert!(config.share.replicas > 0);
            assert!(!config.resource.name.is_empty());
            let gpus = [gpu("GPU-a", 0, 80 << 30), gpu("GPU-b", 1, 4 << 30), gpu("GPU-c", 2, 0)];
            let _ = capacity::remarks(&gpus, &config);
            for gpu in gpus {
                let sold: u128 = shares::cut(&gpu, &config)
                    .iter()
                    .map(|share| u128::from(share.count) * u128::from(share.memory_bytes))
                    .sum();
                let room = gpu.memory_bytes.saturating_sub(config.gpus.reserve_bytes);
                let possible = capacity::check(&[gpu], &config).is_empty();
                assert!(!possible || (sold > 0 && sold <= u128::from(room)), "{sold} of {room}");
            }
        }
        Err(error) => {
            assert!(!error.problems.is_empty());
            let lines = u32::try_from(text.lines().count().max(1)).unwrap_or(u32::MAX);
            for problem in &error.problems {
                let line = problem.line.and_then(|line| u32::try_from(line).ok());
                assert!(line.is_none_or(|line| (1..=lines + 1).contains(&line)), "{problem:?}");
                assert!(!problem.message.is_empty(), "{problem:?}");
            }
        }
    }
}

fn gpu(uuid: &str, index: u32, memory_bytes: u64) -> Gpu {
    Gpu {
        uuid: uuid.into(),
        index,
        minor: index,
        name: "NVIDIA A100-SXM4-80GB".into(),
        pci_bus_id: format!("00000000:{index:02x}:00.0"),
        numa_node: None,
        memory_bytes,
        driver_bytes: 0,
        context_bytes: None,
        mig: None,
    }
}
