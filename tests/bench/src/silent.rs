//! What the plugin's start sells beside a GPU that does not answer: by each question that it asks, and each error.

use std::process::Command;

use anyhow::{Context, ensure};

use crate::report::Report;
use crate::world::World;

/// GPUs of the machine; one is sick.
const GPUS: usize = 4;
/// Replicas of each.
const REPLICAS: usize = 3;
const SICK: &str = "2";

const QUESTIONS: [&str; 7] = [
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetMemoryInfo",
];
const ERRORS: [&str; 7] = [
    "unknown",
    "not-supported",
    "lost",
    "timeout",
    "insufficient-power",
    "irq-issue",
    "no-permission",
];

/// Measures the least share of the other GPUs' replicas that is sold, over all questions and errors.
///
/// # Errors
/// The simulator or the check fails.
#[allow(clippy::cast_precision_loss, reason = "a few replicas")]
pub fn run(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let machine = dir.path().join("machine.toml");
    let gpu =
        |n: usize| format!("[[gpu]]\nmemory = \"16GiB\"\npci_bus_id = \"0000:{}:00.0\"\n", 20 + n);
    std::fs::write(&machine, (0..GPUS).map(gpu).collect::<String>())?;
    let config = dir.path().join("config.toml");
    let text = format!("[share]\nreplicas = {REPLICAS}\n[gpus]\ncontext_overhead = \"64Mi\"\n");
    std::fs::write(&config, text)?;
    let command = |name: &str| {
        let mut command = Command::new(world.artefacts.path(name));
        command.envs(world.envs()).env("SIMGPU_CONFIG", &machine);
        command.env("SIMGPU_STATE", dir.path().join("state"));
        command
    };
    let fail = |question: &str, error: &str| {
        let status = command("simgpu-ctl").args(["fail", SICK, question, error]).status()?;
        ensure!(status.success(), "simgpu-ctl fail {question} {error}");
        anyhow::Ok(())
    };
    let mut least = f64::MAX;
    for question in QUESTIONS {
        for error in ERRORS {
            fail(question, error)?;
            let check = command("tessera").args(["config", "check"]).arg(&config).output()?;
            fail(question, "ok")?;
            let offers = String::from_utf8(check.stdout).context("config check")?;
            // GPU, name of two words, UUID, resource, replicas.
            let sold =
                offers.lines().filter(|line| line.contains("GPU-") && !line.starts_with(SICK));
            let sold =
                sold.filter_map(|line| line.split_whitespace().nth(5)?.parse::<usize>().ok());
            let share = sold.sum::<usize>() as f64 / ((GPUS - 1) * REPLICAS) as f64;
            least = least.min(share * 100.0);
        }
    }
    let what = "replicas of the others sold beside a sick GPU";
    report.at_least("start_with_sick_gpu_sold", what, "%", least, 100.0);
    Ok(())
}
