//! `tessera waste` for people and spreadsheets.

use tessera_model::percent::format_cores;
use tessera_model::quantity::format_bytes;
use tessera_model::time_format;
use tessera_view::advice::{NamespaceWaste, TenantWaste, Waste};

use super::{length, name};
use crate::output::quoted;
use tessera_api::print::{Cell, Column, Page, Paper, Sheet, Tone};

const COST: &str = "COST OF WASTE";
const NAMESPACES: &[Column] = &[
    Column::name("NAMESPACE"),
    Column::number("ASKED").rank(1),
    Column::number("USED").rank(1),
    Column::number("WASTED"),
    Column::number(COST),
];
const TENANTS: &[Column] = &[
    Column::name("POD").least(20),
    Column::name("CONTAINER").rank(4),
    Column::number("PEAK OF MEMORY").rank(1),
    Column::number("WANTED OF SHARE").rank(2),
    Column::number("IDLE").rank(1),
    Column::number("WASTED"),
    Column::text("CONFIDENCE").rank(3),
];

/// By namespace, then by container.
pub(crate) fn text(waste: &Waste, paper: Paper) -> String {
    let mut page = Page::new(paper);
    page.notes(&waste.remarks);
    let since = time_format::utc(waste.since_unix_ms);
    if waste.namespaces.is_empty() {
        let text = format!("Since {since} nobody had a share: nothing was wasted.");
        page.say(0, Tone::Plain, &text);
        return page.finish();
    }
    let priced = waste.price_per_gpu_hour > 0.0;
    let price = match priced {
        true => format!(", at {} for a GPU and hour", money(waste.price_per_gpu_hour, waste)),
        false => String::new(),
    };
    page.say(0, Tone::Plain, &format!("Since {since}, in GPU-hours{price}:"));
    page.gap();
    let mut sheet = Sheet::new(NAMESPACES);
    let mut add = |one: &NamespaceWaste| sheet.row(row(one, waste).map(Cell::from).into());
    waste.namespaces.iter().for_each(&mut add);
    if waste.namespaces.len() > 1 {
        let sum = |of: fn(&NamespaceWaste) -> f64| waste.namespaces.iter().map(of).sum();
        add(&NamespaceWaste {
            namespace: "all".to_owned(),
            asked_gpu_hours: sum(|one| one.asked_gpu_hours),
            used_gpu_hours: sum(|one| one.used_gpu_hours),
            cost: sum(|one| one.cost),
            tenants: Vec::new(),
        });
    }
    if !priced {
        sheet = sheet.without(COST);
    }
    sheet.lay(&mut page);
    page.gap();
    let mut sheet = Sheet::new(TENANTS);
    for of in &waste.namespaces {
        for tenant in &of.tenants {
            sheet.row(tenant_row(&of.namespace, tenant).map(Cell::from).into());
        }
    }
    sheet.lay(&mut page);
    page.finish()
}

fn row(one: &NamespaceWaste, waste: &Waste) -> [String; 5] {
    let hours = |hours: f64| format!("{hours:.1}");
    [
        name(&one.namespace),
        hours(one.asked_gpu_hours),
        hours(one.used_gpu_hours),
        hours(one.asked_gpu_hours - one.used_gpu_hours),
        money(one.cost, waste),
    ]
}

fn money(amount: f64, waste: &Waste) -> String {
    format!("{amount:.2} {}", waste.currency)
}

fn tenant_row(namespace: &str, tenant: &TenantWaste) -> [String; 7] {
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
    [
        pod,
        name(&tenant.container),
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
