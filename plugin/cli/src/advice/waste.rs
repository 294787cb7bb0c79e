//! `tessera waste` for people and spreadsheets.

use std::time::Duration;

use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_model::time_format;
use tessera_view::advice::{NamespaceWaste, TenantWaste, Waste};

use super::text::{name, remarks, table};

const NAMESPACE: usize = 30;
const POD: usize = 34;
const CONTAINER: usize = 12;

/// By namespace, then by container.
pub(crate) fn text(waste: &Waste) -> String {
    let mut out = String::new();
    remarks(&mut out, &waste.remarks);
    let since = time_format::utc(waste.since_unix_ms);
    if waste.namespaces.is_empty() {
        out.push_str(&format!("Since {since} nobody had a share: nothing was wasted.\n"));
        return out;
    }
    let price = match waste.price_per_gpu_hour > 0.0 {
        true => format!(", at {} for a GPU and hour", money(waste.price_per_gpu_hour, waste)),
        false => String::new(),
    };
    out.push_str(&format!("Since {since}, in GPU-hours{price}:\n\n"));
    let priced = waste.price_per_gpu_hour > 0.0;
    let header = ["NAMESPACE", "ASKED", "USED", "WASTED", "COST OF WASTE"];
    let shown = if priced { 5 } else { 4 };
    let mut rows: Vec<Vec<String>> = waste.namespaces.iter().map(|one| row(one, waste)).collect();
    if waste.namespaces.len() > 1 {
        let sum = |of: fn(&NamespaceWaste) -> f64| waste.namespaces.iter().map(of).sum();
        let all = NamespaceWaste {
            namespace: "all".to_owned(),
            asked_gpu_hours: sum(|one| one.asked_gpu_hours),
            used_gpu_hours: sum(|one| one.used_gpu_hours),
            cost: sum(|one| one.cost),
            tenants: Vec::new(),
        };
        rows.push(row(&all, waste));
    }
    rows.iter_mut().for_each(|row| row.truncate(shown));
    table(&mut out, &header[..shown], rows);
    out.push('\n');
    let header =
        ["POD", "CONTAINER", "PEAK OF MEMORY", "WANTED OF SHARE", "IDLE", "WASTED", "CONFIDENCE"];
    let tenants = waste
        .namespaces
        .iter()
        .flat_map(|of| of.tenants.iter().map(|tenant| tenant_row(&of.namespace, tenant)));
    table(&mut out, &header, tenants.collect());
    out
}

fn row(one: &NamespaceWaste, waste: &Waste) -> Vec<String> {
    let hours = |hours: f64| format!("{hours:.1}");
    vec![
        name(&one.namespace, NAMESPACE),
        hours(one.asked_gpu_hours),
        hours(one.used_gpu_hours),
        hours(one.asked_gpu_hours - one.used_gpu_hours),
        money(one.cost, waste),
    ]
}

fn money(amount: f64, waste: &Waste) -> String {
    format!("{amount:.2} {}", waste.currency)
}

fn tenant_row(namespace: &str, tenant: &TenantWaste) -> Vec<String> {
    let pod = match tenant.pod.is_empty() {
        true => "-".to_owned(),
        false => format!("{namespace}/{}", tenant.pod),
    };
    let idle = match (tenant.live, tenant.idle_seconds) {
        (false, _) => "gone".to_owned(),
        (true, None) => "-".to_owned(),
        (true, Some(seconds)) => {
            let text = length(seconds);
            if tenant.idle { format!("{text} !") } else { text }
        }
    };
    vec![
        name(&pod, POD),
        name(&tenant.container, CONTAINER),
        format!(
            "{} of {}",
            format_bytes(tenant.memory_peak_bytes),
            format_bytes(tenant.memory_limit_bytes)
        ),
        format!("{} of {}", format_cores(tenant.wanted_millis), format_cores(tenant.cores_millis)),
        idle,
        format!("{:.1}", tenant.wasted_gpu_hours),
        tenant.confidence.clone(),
    ]
}

fn length(seconds: f64) -> String {
    let ms = Duration::try_from_secs_f64(seconds).unwrap_or_default().as_millis();
    time_format::ago(0, i64::try_from(ms).unwrap_or(i64::MAX))
}

/// RFC 4180, a line for each container.
pub(super) fn csv(waste: &Waste) -> String {
    let mut out = String::from(
        "namespace,pod,container,workload,live,memory_limit_bytes,memory_peak_bytes,cores_millis,wanted_millis,\
         idle_seconds,idle,asked_gpu_hours,wasted_gpu_hours,cost,currency,confidence\r\n",
    );
    for of in &waste.namespaces {
        for tenant in &of.tenants {
            let fields = [
                quoted(&of.namespace),
                quoted(&tenant.pod),
                quoted(&tenant.container),
                quoted(&tenant.workload),
                tenant.live.to_string(),
                tenant.memory_limit_bytes.to_string(),
                tenant.memory_peak_bytes.to_string(),
                tenant.cores_millis.to_string(),
                tenant.wanted_millis.to_string(),
                tenant.idle_seconds.map_or_else(String::new, |seconds| format!("{seconds:.0}")),
                tenant.idle.to_string(),
                format!("{:.6}", tenant.asked_gpu_hours),
                format!("{:.6}", tenant.wasted_gpu_hours),
                format!("{:.6}", tenant.cost),
                quoted(&waste.currency),
                quoted(&tenant.confidence),
            ];
            out.push_str(&fields.join(","));
            out.push_str("\r\n");
        }
    }
    out
}

/// A field of CSV that no spreadsheet takes for a formula.
pub(crate) fn quoted(text: &str) -> String {
    let formula = text.starts_with(['=', '+', '-', '@', '\t', '\r']);
    let text = if formula { format!("'{text}") } else { text.to_owned() };
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text,
    }
}
