//! What a reader may see of explanations: its own allocations, and of others that they had the GPU.

use super::Rights;
use crate::explain::words::originator;
use crate::explain::{Behind, Explanation, Explanations, Limit, Stand, Story, TrailLine};

/// Leaves out of explanations what the reader may not see; none where nothing is left.
pub fn explanations(mut all: Explanations, rights: &Rights) -> Option<Explanations> {
    if *rights != Rights::All {
        all.nodes.retain_mut(|one| explanation(&mut one.explanation, rights));
    }
    (!all.nodes.is_empty()).then_some(all)
}

/// Whether anything is left.
fn explanation(one: &mut Explanation, rights: &Rights) -> bool {
    // An older plugin's sentences name others, and nothing says where.
    if !one.apart {
        return false;
    }
    one.allocations.retain(|story| rights.may_see(story.namespace()));
    one.allocations.iter_mut().for_each(|story| narrow(story, rights));
    // A GPU's story is that of all its tenants and of the node.
    one.gpus.clear();
    // They may be others'.
    one.left_out = 0;
    // Sentences name files.
    one.remarks.clear();
    one.refusals.retain(|refusal| rights.may_see(&refusal.namespace));
    !one.allocations.is_empty() || !one.refusals.is_empty()
}

fn narrow(story: &mut Story, rights: &Rights) {
    if let Some(now) = &mut story.now {
        now.holder = now.holder.take().filter(|holder| rights.may_see(&holder.namespace));
        now.other_holders.retain(|holder| rights.may_see(&holder.namespace));
        now.claim = now.claim.take().filter(|claim| rights.may_see(&claim.namespace));
    }
    if let Some(placement) = &mut story.placement {
        placement.stands.iter_mut().for_each(stand);
        placement.gpus = placement.stands.iter().map(Stand::sentence).collect();
    }
    story.limits.iter_mut().for_each(limit);
    for other in &mut story.neighbours {
        other.who = std::mem::take(&mut other.who).narrowed(rights);
    }
    if let Some(how) = &mut story.enforcement {
        how.warnings.clear();
    }
    for incident in &mut story.incidents {
        apart(&mut incident.reason, incident.reason_is_own, &mut incident.behind, rights);
    }
    story.trail.iter_mut().for_each(|line| trail_line(line, rights));
}

/// As of a GPU in a list: that it is cordoned is everybody's, by whom and why the operators'.
fn stand(stand: &mut Stand) {
    if !stand.cordon.is_empty() {
        stand.cordon = "cordoned".to_owned();
    }
    if !stand.withheld.is_empty() {
        stand.withheld = "those who run the node know why".to_owned();
    }
}

fn limit(limit: &mut Limit) {
    if limit.set_unix_ms != 0 {
        limit.set_by = originator(&limit.set_by).to_owned();
        limit.memory_origin = Limit::set(limit.set_unix_ms, &limit.set_by);
        limit.cores_origin.clone_from(&limit.memory_origin);
    }
}

fn trail_line(line: &mut TrailLine, rights: &Rights) {
    apart(&mut line.reason, line.reason_is_own, &mut line.behind, rights);
    line.by = originator(&line.by).to_owned();
    line.holder = line.holder.take().filter(|holder| rights.may_see(&holder.namespace));
}

/// A reason that is not only about the tenant itself is dropped; another that the reader may not see has no name.
pub(super) fn apart(
    reason: &mut String,
    is_own: bool,
    behind: &mut Option<Behind>,
    rights: &Rights,
) {
    if !is_own {
        reason.clear();
    }
    *behind = behind.take().map(|other| other.narrowed(rights));
}
