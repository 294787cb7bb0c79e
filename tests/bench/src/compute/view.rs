//! How the arbiter says it stands, for people.

use std::fmt::Write;

use tessera_arbiter::{GpuShare, TenantShare, View};

/// A line for the arbiter, for each GPU and for each tenant.
pub fn text(view: &View) -> String {
    let us = |ns: u64| ns as f64 / 1e3;
    let mut text = format!(
        "arbiter: {} gate words; from a message to them p50 {:.1} p99 {:.1} µs\n",
        view.commands,
        us(view.turn_p50_ns),
        us(view.turn_p99_ns)
    );
    let lines = view.gpus.iter().map(gpu).chain(view.tenants.iter().map(tenant));
    for line in lines {
        // A string takes all of it.
        let _ = writeln!(text, "  {line}");
    }
    text
}

fn gpu(gpu: &GpuShare) -> String {
    let holder =
        gpu.holder.as_deref().map_or("free".to_owned(), |id| format!("held by {}", short(id)));
    let late: Vec<&str> = gpu.late.iter().map(|id| short(id)).collect();
    let late = if late.is_empty() { String::new() } else { format!(", late: {}", late.join(" ")) };
    let quantum = gpu.quantum_ns as f64 / 1e6;
    format!("{}: {holder}, {} wait, a lease lasts {quantum:.1} ms{late}", gpu.uuid, gpu.waiting)
}

fn tenant(tenant: &TenantShare) -> String {
    let seconds = |ns: u64| ns as f64 / 1e9;
    let kind = if tenant.is_strict() { " strict" } else { "" };
    let mut text = format!(
        "tenant {}: asked {}m{kind}, got {}m in 1 s and {}m in 10 s; {:?}, {} processes, {} leases of {:.2} s in \
         all, waited {:.2} s",
        short(&tenant.id),
        tenant.share.millis,
        tenant.got_1s_millis,
        tenant.got_10s_millis,
        tenant.state,
        tenant.processes,
        tenant.totals.leases,
        seconds(tenant.totals.leased_ns),
        seconds(tenant.totals.waited_ns),
    );
    let violations = &tenant.violations;
    let amiss = [
        (tenant.owing as u64, "still drain"),
        (tenant.totals.overlaps, "drained too late"),
        (tenant.totals.long_waits, "waited a second or more"),
        (tenant.ignored, "messages of another epoch"),
        (violations.garbage, "no message"),
        (violations.nonsense, "without sense"),
        (violations.dropped, "dropped"),
        (violations.turned_away, "turned away"),
        (violations.throttled, "throttled"),
    ];
    for (count, what) in amiss.into_iter().filter(|(count, _)| *count > 0) {
        let _ = write!(text, "; {count} {what}");
    }
    text
}

/// As much of an id as distinguishes it from others.
fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_arbiter::ProtocolViolations;
    use tessera_arbiter::policy::{GateState, Share, ShareKind, TenantTotals};

    #[test]
    fn a_line_tells_what_there_is_and_only_what_is_amiss() {
        let good = TenantShare {
            id: "0123456789abcdef".into(),
            uuids: vec!["GPU-a".into()],
            share: Share { millis: 300, kind: ShareKind::Strict },
            state: GateState::Yield,
            processes: 2,
            owing: 0,
            waiting_ns: None,
            got_1s_millis: 290,
            got_10s_millis: 300,
            used_10s_millis: Some(250),
            totals: TenantTotals {
                leased_ns: 1_500_000_000,
                waited_ns: 250_000_000,
                leases: 75,
                ..TenantTotals::default()
            },
            ignored: 0,
            violations: ProtocolViolations::default(),
        };
        let bad = TenantShare {
            id: "b".into(),
            totals: TenantTotals { overlaps: 3, ..good.totals },
            ..good.clone()
        };
        let gpu = GpuShare {
            uuid: "GPU-a".into(),
            holder: Some(good.id.clone()),
            late: vec!["b".into()],
            waiting: 1,
            quantum_ns: 20_000_000,
        };
        let view = View {
            gpus: vec![gpu],
            tenants: vec![good, bad],
            commands: 9,
            turn_p50_ns: 1500,
            turn_p99_ns: 4000,
            ..View::default()
        };
        let text = text(&view);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "arbiter: 9 gate words; from a message to them p50 1.5 p99 4.0 µs");
        assert_eq!(lines[1], "  GPU-a: held by 01234567, 1 wait, a lease lasts 20.0 ms, late: b");
        assert_eq!(
            lines[2],
            "  tenant 01234567: asked 300m strict, got 290m in 1 s and 300m in 10 s; Yield, 2 processes, 75 \
             leases of 1.50 s in all, waited 0.25 s"
        );
        assert!(lines[3].ends_with("waited 0.25 s; 3 drained too late"), "{text}");
    }
}
