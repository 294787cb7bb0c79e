//! What `tessera config plan` and `reload` print.

use std::fmt::Write;

use tessera_api::print::{Page, Paper, Tone, table};
use tessera_model::percent::format_cores;
use tessera_model::printable;
use tessera_model::quantity::format_bytes;
use tessera_view::change::{
    AllocationChange, ConfigurationChange, ConfigurationProblem, PlanResponse, ReloadResponse,
    ShareChange, ShareView,
};

fn problem_lines(problems: &[ConfigurationProblem], file: &str) -> String {
    let mut out = String::new();
    for ConfigurationProblem { key, line, message } in problems {
        let (key, message) = (printable::line(key), printable::line(message));
        // Writing to a string does not fail.
        let _ = match (line, &*key) {
            (0, "") => writeln!(out, "{file}: {message}"),
            (0, key) => writeln!(out, "{file}: {key}: {message}"),
            (line, "") => writeln!(out, "{file}:{line}: {message}"),
            (line, key) => writeln!(out, "{file}:{line}: {key}: {message}"),
        };
    }
    out
}

fn change_table(out: &mut String, changes: &[ConfigurationChange]) {
    let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "–".to_owned());
    let row = |change: &ConfigurationChange| {
        let (before, after) = (value(&change.before), value(&change.after));
        vec![change.key.clone(), before, after, change.takes_effect.clone()]
    };
    let header = ["KEY", "BEFORE", "AFTER", "TAKES EFFECT"];
    table(out, &header, changes.iter().map(row).collect());
}

/// Keys that the file leaves out, by when their defaults take effect: names alone, because of a part of a file
/// they are most of what there is.
fn absent_text(changes: &[ConfigurationChange]) -> String {
    let mut page = Page::new(Paper::plain());
    page.say(0, Tone::Plain, "NOT IN THE FILE, SO BACK TO THE DEFAULT");
    let mut when: Vec<&str> = changes.iter().map(|change| change.takes_effect.as_str()).collect();
    when.sort_unstable();
    when.dedup();
    for when in when {
        let keys = changes.iter().filter(|change| change.takes_effect == when);
        let keys: Vec<&str> = keys.map(|change| change.key.as_str()).collect();
        page.say(2, Tone::Plain, &format!("{when}: {}", keys.join(", ")));
    }
    page.say(
        2,
        Tone::Plain,
        "A file is taken whole: give all of it, or leave these as they are meant to be.",
    );
    page.finish()
}

/// For people.
pub(super) fn plan_text(plan: &PlanResponse, file: &str) -> String {
    let mut out = String::new();
    if !plan.problems.is_empty() {
        let _ = writeln!(
            out,
            "{}This configuration would be refused, and the one in force stay.",
            problem_lines(&plan.problems, file)
        );
        return out;
    }
    if plan.changes.is_empty() {
        out.push_str("Nothing would change.\n");
    } else {
        let (absent, said): (Vec<_>, Vec<_>) =
            plan.changes.iter().cloned().partition(|change| change.absent);
        if !said.is_empty() {
            out.push_str("CONFIGURATION\n");
            change_table(&mut out, &said);
        }
        if !absent.is_empty() {
            let gap = if said.is_empty() { "" } else { "\n" };
            out.push_str(gap);
            out.push_str(&absent_text(&absent));
        }
    }
    if !plan.shares.is_empty() {
        out.push_str("\nREPLICAS\n");
        let header = ["GPU", "RESOURCE", "REPLICAS", "MEMORY", "CORES", "CHANGE"];
        table(&mut out, &header, plan.shares.iter().map(share_row).collect());
    }
    if !plan.allocations.is_empty() {
        out.push_str("\nRUNNING ALLOCATIONS\n");
        for allocation in &plan.allocations {
            let _ = writeln!(out, "  {}", printable::line(&name(allocation)));
            for effect in &allocation.effects {
                let _ = writeln!(out, "    {}", printable::line(effect));
            }
        }
    }
    if !plan.notes.is_empty() {
        out.push_str("\nNOTES\n");
        let mut page = Page::new(Paper::plain());
        plan.notes.iter().for_each(|note| page.say(2, Tone::Plain, note));
        out.push_str(&page.finish());
    }
    out
}

fn name(allocation: &AllocationChange) -> String {
    let id = &allocation.id;
    let resource = match allocation.resource_name.as_str() {
        "" => String::new(),
        resource => format!(", {resource}"),
    };
    match &allocation.holder {
        Some(holder) => {
            format!("{}/{} ({}){resource}", holder.namespace, holder.pod, holder.container)
        }
        None => format!("allocation {id}{resource}"),
    }
}

fn share_row(change: &ShareChange) -> Vec<String> {
    let both = |show: &dyn Fn(&ShareView) -> String| {
        let (before, after) = (change.before.as_ref().map(show), change.after.as_ref().map(show));
        match (before, after) {
            (Some(before), Some(after)) if before == after => after,
            (before, after) => {
                let text = |text: Option<String>| text.unwrap_or_else(|| "–".to_owned());
                format!("{} → {}", text(before), text(after))
            }
        }
    };
    let mut words = Vec::new();
    let mut say = |count: u32, text: &str| {
        if count > 0 {
            words.push(format!("{count} {text}"));
        }
    };
    say(change.appear, "appear");
    say(change.retire, "retire");
    say(change.retire_held, "of them listed Unhealthy until their pods end");
    say(change.no_room, "Unhealthy until there is room beside what runs");
    let index = change.gpu_index.map(|index| index.to_string());
    vec![
        index.unwrap_or_else(|| change.gpu_uuid.clone()),
        change.resource_name.clone(),
        both(&|view| view.replicas.to_string()),
        both(&|view| format_bytes(view.memory_bytes)),
        both(&|view| format!("{} {}", format_cores(view.cores_millis), view.policy.name())),
        words.join(", "),
    ]
}

/// For people.
pub(super) fn reload_text(answer: &ReloadResponse) -> String {
    if !answer.problems.is_empty() {
        return format!(
            "{}Refused; the last good configuration stays in force.\n",
            problem_lines(&answer.problems, &answer.file)
        );
    }
    let mut out = String::new();
    if answer.changes.is_empty() {
        out.push_str("In force; nothing has changed.\n");
    } else {
        out.push_str("IN FORCE\n");
        change_table(&mut out, &answer.changes);
    }
    if !answer.waiting.is_empty() {
        out.push_str("\nWAITING FOR A RESTART OF THE PLUGIN\n");
        change_table(&mut out, &answer.waiting);
    }
    out
}
