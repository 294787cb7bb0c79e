//! How GPU time is divided, judged by the simulator's own account.
//!
//! Tenants are `tessera-tenant load`s on a simulated machine of their own ([`machine`]), under the shim
//! and the plugin's arbiter, which this process hosts ([`host`]), or without both. What each got is
//! read from the simulator ([`judge`]); of the shim and the arbiter only what they counted is read.

mod caps;
mod host;
mod judge;
mod latency;
mod machine;
mod open;
mod scenario;
mod shares;
mod tenant;
mod tied;

use tessera_arbiter::policy::{MS, Settings, Share, ShareKind};
use tessera_arbiter_model::{Figures, Load, Scenario, simulate};

pub use self::open::launch_each;
use self::scenario::SHALLOW_MS;
use self::tenant::{Gate, Spec};
use crate::report::Report;
use crate::world::{Artefacts, World};

/// What [`run`] can measure alone.
pub const SCENARIOS: [&str; 9] =
    ["open", "shares", "caps", "late", "busy", "tied", "reclaim", "interfere", "simulated"];

/// Time-outs of all runs: in none of them anything fails.
#[derive(Debug, Default)]
struct Timeouts(u64);

/// Measures the scenarios that are wanted.
///
/// # Errors
/// A tenant that does not start.
pub fn run(
    world: &World,
    report: &mut Report,
    wanted: &dyn Fn(&str) -> bool,
) -> anyhow::Result<()> {
    let mut timeouts = Timeouts::default();
    let artefacts = &world.artefacts;
    for name in SCENARIOS.into_iter().filter(|name| wanted(name)) {
        match name {
            "open" => open::run(world, report)?,
            "shares" => shares::run(artefacts, report, &mut timeouts)?,
            "caps" => caps::run(artefacts, report, &mut timeouts)?,
            "late" => caps::late(artefacts, report, &mut timeouts)?,
            "busy" => shares::busy(artefacts, report)?,
            "tied" => tied::run(artefacts, report)?,
            "reclaim" => latency::reclaim(artefacts, report)?,
            "interfere" => latency::interfere(artefacts, report)?,
            _ => simulated(report),
        }
    }
    #[allow(clippy::cast_precision_loss, reason = "a count")]
    let count = timeouts.0 as f64;
    report.figure("gate_timeouts", "gates opened by time-out", "", count, 0.0);
    Ok(())
}

/// A tenant that never has enough: kernels of these microseconds, in turn.
fn backlog(cores: f64, kernel_us: &str) -> Spec {
    let shallow = format!("--shallow-ms={SHALLOW_MS}");
    Spec::new(cores, &[&format!("--kernel-us={kernel_us}"), &shallow])
}

/// A tenant that never has enough of graphs of 8 ms.
fn graphs(cores: f64) -> Spec {
    let shallow = format!("--shallow-ms={SHALLOW_MS}");
    Spec::new(cores, &["--graph", "--kernel-us=500", "--kernels=16", &shallow])
}

/// 128 tenants on one GPU, in pure simulation: the policy alone, with tenants, GPU and messages in no time. What a
/// machine's CPUs do to it is left out.
fn simulated(report: &mut Report) {
    crate::note("128 tenants in pure simulation");
    let equal = play(|_| 7, 1);
    // From 4 to 11 thousandths.
    let weighted = play(|index| 4 + index % 8, 2);
    let worst = |seconds| equal.share_error_pp(seconds).max(weighted.share_error_pp(seconds));
    let what = "128 simulated: share error, 10 s";
    report.figure("share_error_10s_pp_128", what, "pp", worst(10), 0.5);
    report.figure("share_error_1s_pp_128", "· over 1 s", "pp", worst(1), 1.0);
    report.at_least("jain_128", "· Jain's index of equal ones", "", equal.jain(), 0.999);
}

/// Backlogged tenants, with operations of 20 µs to 1 ms.
fn play(millis: impl Fn(u32) -> u32, seed: u64) -> Figures {
    let share = |index| Share { millis: millis(index), kind: ShareKind::Burst };
    simulate(&Scenario {
        settings: Settings::default(),
        loads: (0..128).map(|i| Load::backlogged(share(i), (MS / 50, MS))).collect(),
        changes: Vec::new(),
        delay: (20_000, 60_000),
        late_wakes: None,
        bare: false,
        switch: 0,
        seed,
        until: 12_000 * MS,
    })
}
