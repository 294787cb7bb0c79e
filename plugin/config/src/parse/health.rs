//! `[health]`.

use std::time::Duration;

use super::set;
use crate::health::{Health, XidAction};
use crate::reader::{Report, Section};
use tessera_model::duration;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

pub(super) fn read(report: &mut Report<'_>, section: &mut Section<'_, '_>, health: &mut Health) {
    let shortest = Duration::from_millis(100);
    for (key, target) in [
        ("probe_interval", &mut health.probe_interval),
        ("recovery", &mut health.recovery),
        ("recovery_max", &mut health.recovery_max),
        ("suspect_window", &mut health.suspect_window),
    ] {
        let Some(text) = section.string(report, key) else { continue };
        let parsed = duration::parse(&text).and_then(|length| {
            let fits = (shortest..=DAY).contains(&length);
            fits.then_some(length).ok_or_else(|| format!("\"{text}\" is not from 100ms to 24h"))
        });
        match parsed {
            Ok(length) => *target = length,
            Err(message) => problem(report, key, message),
        }
    }
    for (key, target) in [
        ("probes_failed", &mut health.probes_failed),
        ("probes_passed", &mut health.probes_passed),
        ("suspect_count", &mut health.suspect_count),
    ] {
        match section.integer(report, key).map(u32::try_from) {
            None => {}
            Some(Ok(count @ 1..=100)) => *target = count,
            Some(_) => problem(report, key, "must be from 1 to 100".to_owned()),
        }
    }
    if health.recovery_max < health.recovery {
        let message = format!(
            "is shorter than health.recovery ({}); a relapse would recover sooner than a first fault",
            duration::format(health.recovery)
        );
        problem(report, "recovery_max", message);
    }
    set(&mut health.xid_default, section.choice(report, "xid_default", &XidAction::WORDS));
    for (xid, word) in section.string_map(report, "xid").unwrap_or_default() {
        let action = XidAction::WORDS.iter().find(|(known, _)| *known == word);
        match (xid.parse(), action) {
            (Ok(xid), Some((_, action))) => {
                health.xid.insert(xid, *action);
            }
            (Err(_), _) => problem(report, "xid", format!("\"{xid}\" is no XID; write 79 = …")),
            (_, None) => {
                let words = XidAction::WORDS.map(|(known, _)| format!("\"{known}\"")).join(", ");
                problem(report, "xid", format!("{xid} = \"{word}\": must be one of {words}"));
            }
        }
    }
}

fn problem(report: &mut Report<'_>, key: &str, message: String) {
    let key = format!("health.{key}");
    let line = report.lines.get(&key).copied();
    report.problem(&key, line, message);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    fn problems(text: &str) -> Vec<String> {
        let error = Config::parse(&format!("[health]\n{text}")).unwrap_err();
        error.problems.into_iter().map(|p| format!("{}: {}", p.key, p.message)).collect()
    }

    #[test]
    fn the_file_changes_single_xids_and_the_table_stays() {
        let text = "[health]\nxid = { 94 = \"unhealthy\", 999 = \"ignore\" }\nrecovery = \"2m\"";
        let health = Config::parse(text).unwrap().health;
        assert_eq!(health.action(94), XidAction::Unhealthy);
        assert_eq!(health.action(999), XidAction::Ignore);
        assert_eq!(health.action(79), XidAction::UntilReset);
        assert_eq!(health.action(31), XidAction::Ignore);
        assert_eq!(health.action(1 << 40), XidAction::Suspect);
        assert_eq!(health.recovery, Duration::from_secs(120));
    }

    #[test]
    fn each_mistake_says_what_to_do() {
        for (text, part) in [
            ("recovery = \"5\"", "health.recovery: \"5\" is no length of time"),
            ("recovery = \"0s\"", "not from 100ms to 24h"),
            ("recovery = \"2h\"", "health.recovery_max: is shorter than health.recovery (2h)"),
            ("probes_failed = 0", "health.probes_failed: must be from 1 to 100"),
            ("xid = { x = \"ignore\" }", "health.xid: \"x\" is no XID"),
            ("xid = { 79 = \"ignroe\" }", "must be one of \"ignore\", \"suspect\""),
            ("xid_default = \"none\"", "health.xid_default"),
            ("recovry = \"1m\"", "did you mean `recovery`?"),
        ] {
            let found = problems(text);
            assert!(found.iter().any(|problem| problem.contains(part)), "{text}: {found:?}");
        }
    }
}
