//! The plugin, or why it is silent, and what it sells.

use tessera_view::status::{Dra, Registration, Status};

use crate::print::{Column, Page, Sheet, Tone};
use tessera_model::counted::plural;

/// The plugin in a line, and what is odd about the node it serves.
pub(super) fn plugin(page: &mut Page, status: &Status) {
    let plugin = &status.plugin;
    let state = plugin.registration.text();
    let text = format!(
        "tessera {} (pid {}) serves {}: {state}",
        plugin.version, plugin.pid, plugin.resource_name
    );
    let is_live = plugin.registration == Registration::Live;
    page.say(0, if is_live { Tone::Head } else { Tone::Bad }, &text);
    if !matches!(plugin.others_seen_by.as_str(), "" | "GetAllocatableResources") {
        let text = format!(
            "other device plugins are seen by {} only: this kubelet has no GetAllocatableResources",
            plugin.others_seen_by
        );
        page.say(2, Tone::Plain, &text);
    }
    if let Some(dra) = &plugin.dra {
        page.say(0, Tone::Plain, &dra_line(dra));
    }
}

/// `DRA driver gpu.tessera.dev: registered; 4 devices in 1 slice published, pool n1; 12 claims prepared`.
fn dra_line(dra: &Dra) -> String {
    let registration = match dra.registered {
        true => "registered".to_owned(),
        _ if dra.registration_error.is_empty() => "not registered".to_owned(),
        _ => format!("not registered ({})", dra.registration_error),
    };
    let plural = |n: u32, one: &str| plural(usize::try_from(n).unwrap_or(usize::MAX), one);
    format!(
        "DRA driver {}: {registration}; {} in {} {}, pool {}; {} prepared",
        dra.driver,
        plural(dra.devices, "device"),
        plural(dra.slices, "slice"),
        dra.publication,
        dra.pool,
        plural(dra.claims, "claim"),
    )
}

/// Each resource, where there are several or one is retired.
pub(super) fn resources(page: &mut Page, status: &Status) {
    let resources = status.plugin.resources.as_slice();
    if resources.len() < 2 && !resources.iter().any(|resource| resource.retired) {
        return;
    }
    page.gap();
    page.say(0, Tone::Head, "RESOURCES");
    let mut sheet = Sheet::new(&[
        Column::name("NAME"),
        Column::name("REGISTRATION"),
        Column::number("HEALTHY"),
        Column::number("REPLICAS"),
    ]);
    for resource in resources {
        let state = resource.registration.text();
        let retired = if resource.retired { "; retired, served while it is held" } else { "" };
        sheet.row(vec![
            resource.name.as_str().into(),
            format!("{state}{retired}").into(),
            resource.healthy.to_string().into(),
            resource.replicas.to_string().into(),
        ]);
    }
    sheet.lay(page);
}
