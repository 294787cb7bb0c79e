//! 128 tenants on one GPU, in pure simulation: the policy alone, with tenants, GPU and messages in no
//! time. What a machine's CPUs do to it is left out.

use serde_json::json;
use tessera_arbiter::policy::{MS, Settings, Share, ShareKind};
use tessera_arbiter_model::{Figures, Load, Scenario, simulate};

use super::Report;

/// Tenants.
const TENANTS: u32 = 128;
/// Seconds simulated.
const SECONDS: u64 = 12;

/// Measures it.
pub fn run(report: &mut Report) {
    crate::note("128 tenants in pure simulation");
    let equal = play(|_| 7, 1);
    // From 4 to 11 thousandths.
    let weighted = play(|index| 4 + index % 8, 2);
    let ten = equal.share_error_pp(10).max(weighted.share_error_pp(10));
    report.figure(
        "share_error_10s_pp_128",
        "128 simulated: share error, 10 s",
        "pp",
        ten,
        Some(0.5),
    );
    let second = equal.share_error_pp(1).max(weighted.share_error_pp(1));
    report.figure("share_error_1s_pp_128", "· over 1 s", "pp", second, Some(1.0));
    report.at_least("jain_128", "· Jain's index of equal ones", "", equal.jain(), Some(0.999));
    #[allow(clippy::cast_precision_loss, reason = "nanoseconds far below 2^53")]
    let percent = |figures: &Figures| figures.policy_ns as f64 / figures.elapsed_ns as f64 * 100.0;
    let cpu = percent(&equal).max(percent(&weighted));
    report.figure("policy_cpu_pct_128", "· CPU of the policy alone", "%", cpu, None);
    let value = |figures: &Figures| {
        json!({
            "share_error_1s_pp": figures.share_error_pp(1),
            "share_error_10s_pp": figures.share_error_pp(10),
            "jain": figures.jain(),
            "double_grants": figures.double_grants,
            "busy_ns": figures.busy_ns,
            "idle_wanted_ns": figures.idle_wanted_ns,
            "starved_ns_max": figures.tenants.iter().map(|t| t.starved_ns).max(),
            "events": figures.events,
            "policy_ns": figures.policy_ns,
        })
    };
    report.put("detail_128", json!({ "equal": value(&equal), "weighted": value(&weighted) }));
}

/// Backlogged tenants, with operations of 20 µs to 1 ms.
fn play(millis: impl Fn(u32) -> u32, seed: u64) -> Figures {
    let share = |index| Share { millis: millis(index), kind: ShareKind::Burst };
    simulate(&Scenario {
        settings: Settings::default(),
        loads: (0..TENANTS).map(|i| Load::backlogged(share(i), (MS / 50, MS))).collect(),
        changes: Vec::new(),
        delay: (20_000, 60_000),
        late_wakes: None,
        bare: false,
        words: true,
        switch: 0,
        seed,
        until: SECONDS * 1000 * MS,
    })
}
