//! The arbiter's policy against simulated tenants and GPUs, and against nonsense.

mod caps;
mod gangs;
mod late;
mod law;
mod nonsense;
mod pauses;
mod shares;
mod steps;
mod tied;
mod traced;
mod woken;

use tessera_arbiter::policy::{GateState, MS, Policy, Settings, Share, ShareKind, TenantId, Used};
use tessera_arbiter_model::{Change, Figures, LateWakes, Load, Scenario, TenantFigures, simulate};

const US: u64 = 1_000;
const SECOND: u64 = 1_000 * MS;
/// The way of a message or command.
const DELAY: (u64, u64) = (10 * US, 60 * US);

fn burst(millis: u32) -> Share {
    Share { millis, kind: ShareKind::Burst }
}

fn strict(millis: u32) -> Share {
    Share { millis, kind: ShareKind::Strict }
}

fn scenario(loads: Vec<Load>, until: u64) -> Scenario {
    let (settings, changes) = (Settings::default(), vec![]);
    Scenario {
        settings,
        loads,
        changes,
        delay: DELAY,
        late_wakes: None,
        bare: false,
        switch: 0,
        seed: 1,
        until,
    }
}

fn play(loads: Vec<Load>, until: u64) -> Figures {
    simulate(&scenario(loads, until))
}

fn play_with(loads: Vec<Load>, changes: Vec<(u64, Change)>, until: u64) -> Figures {
    simulate(&Scenario { changes, ..scenario(loads, until) })
}

#[allow(clippy::cast_precision_loss, reason = "far below 2^53")]
fn float(ns: u64) -> f64 {
    ns as f64
}
