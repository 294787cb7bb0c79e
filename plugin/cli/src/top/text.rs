//! Numbers in few characters.

use tessera_view::gpu::Gpu;
use tessera_view::tenant::Tenant;

/// A size in at most five characters: `512M`, `9.8G`, `39.7G`, `1.5T`.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "K", "M", "G", "T", "P"];
    let mut unit = 0;
    let mut value = u128::from(bytes) * 10;
    // 1000, so that three digits and a point always do.
    while value >= 10_000 && unit + 1 < UNITS.len() {
        value /= 1024;
        unit += 1;
    }
    match (value / 10, value % 10) {
        (whole, 0) => format!("{whole}{}", UNITS[unit]),
        (whole, _) if whole >= 100 => format!("{whole}{}", UNITS[unit]),
        (whole, tenth) => format!("{whole}.{tenth}{}", UNITS[unit]),
    }
}

pub(super) fn dash(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

/// A part of one as per cent.
pub(super) fn percent(part: f64) -> String {
    format!("{:.0}%", part * 100.0)
}

/// A rate in at most five characters.
pub(super) fn per_second(rate: f64) -> String {
    match rate {
        r if r <= 0.0 => "0".to_owned(),
        r if r < 10.0 => format!("{r:.1}"),
        r if r < 10_000.0 => format!("{r:.0}"),
        r if r < 1e6 => format!("{:.0}k", r / 1e3),
        r if r < 1e9 => format!("{:.0}M", r / 1e6),
        _ => ">1G".to_owned(),
    }
}

/// The length of a lease.
pub(super) fn quantum(us: u64) -> String {
    match us {
        0 => "-".to_owned(),
        us if us < 10_000 => format!("{}.{}ms", us / 1000, us % 1000 / 100),
        us => format!("{}ms", us / 1000),
    }
}

/// The holder of a GPU's lease, as a pod where that is known.
pub(super) fn holder(gpu: &Gpu, tenants: &[Tenant]) -> String {
    let id = gpu.lease.as_ref().map_or("", |lease| lease.holder.as_str());
    let holder = tenants.iter().find(|one| one.id == id && !one.pod.is_empty());
    match (holder, id) {
        (_, "") => "-".to_owned(),
        (Some(one), _) => format!("{}/{}", one.namespace, one.pod),
        (None, id) => id.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (size, text) in [
            (0, "0B"),
            (999, "999B"),
            (1023, "0.9K"),
            (1 << 20, "1M"),
            (3 << 29, "1.5G"),
            (80 << 30, "80G"),
            (u64::MAX, "16383P"),
        ] {
            assert_eq!(bytes(size), text);
        }
        assert_eq!(
            [0.0, 0.25, 12.4, 12_345.0, 2e6, 1e12].map(per_second),
            ["0", "0.2", "12", "12k", "2M", ">1G"]
        );
        assert_eq!([0, 5000, 2500, 20_000].map(quantum), ["-", "5.0ms", "2.5ms", "20ms"]);
    }
}
