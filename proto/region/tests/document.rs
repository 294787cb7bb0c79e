//! The tables of docs/internals/pages.md say what the types say.

use std::mem::offset_of;

use tessera_region::layout::{QuotaGpu, QuotaPage, Slot, UsageHeader};

/// The rows `| offset | bytes | `field` |` of the table that follows `heading`.
fn rows(heading: &str) -> Vec<(usize, usize, String)> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/internals/pages.md");
    let text = std::fs::read_to_string(path).unwrap();
    let table = text.split_once(heading).unwrap_or_else(|| panic!("no {heading:?}")).1;
    let table = table.lines().skip_while(|line| !line.starts_with("| 0 |"));
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let field = cells[3].trim_matches('`').to_owned();
        (cells[1].parse().unwrap(), cells[2].parse().unwrap(), field)
    };
    table.take_while(|line| line.starts_with('|')).map(row).collect()
}

/// Rows have no gaps between them, and say the offset of every field named.
fn check(heading: &str, fields: &[(&str, usize)], private: &[&str]) {
    let rows = rows(heading);
    let mut end = 0;
    for (offset, bytes, field) in &rows {
        assert_eq!(*offset, end, "{heading}: {field}");
        end += bytes;
        match fields.iter().find(|(name, _)| name == field) {
            Some((_, at)) => assert_eq!(at, offset, "{heading}: {field}"),
            None => assert!(private.contains(&field.as_str()), "{heading}: {field}"),
        }
    }
    assert_eq!(rows.len(), fields.len() + private.len(), "{heading}");
}

macro_rules! fields {
    ($of:ty: $($field:ident)*) => { &[$((stringify!($field), offset_of!($of, $field))),*] };
}

#[test]
fn the_quota_page_is_as_documented() {
    let page = fields!(QuotaPage: magic abi gpu_count generation heartbeat_ns allocation arbiter_ns departure_us gpus);
    check("## Quota page", page, &["reserved", "tail"]);
    let gpu = fields!(QuotaGpu: uuid memory_limit_bytes context_overhead_bytes
        observed_overhead_bytes cores_millis policy gate phase_millis window window_us idle_us
        departing);
    check("One GPU:", gpu, &["reserved"]);
}

#[test]
fn the_usage_page_is_as_documented() {
    let header = fields!(UsageHeader: magic abi slot_count generation high_water recovered_ns past
        departing_ns);
    check("## Usage page", header, &["line", "pad", "gap", "gap2", "tail"]);
    let slot = fields!(Slot: charged granted peak kinds refusals allocations frees driver_refusals
        launches gate_wait_ns gpu_time_ns last_refused_bytes last_refused_ns claimed_ns pid more_imports imports
        gate_waits gate_timeouts window_waits);
    check("One slot,", slot, &["reserved"]);
}
