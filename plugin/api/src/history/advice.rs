//! What to ask for instead, and what is asked and not used: judged by the figures of the history.

use tessera_advice::{Observed, Question};
use tessera_config::Advice;
use tessera_model::time_format;
use tessera_view::advice::{Recommendations, Waste};
use tessera_view::history::{Answer, Query, TenantSeries};
use tessera_view::node::Node;
use tessera_web::source::{Scope, SourceError};

/// Lengths of the history's longer buckets, seconds.
const MINUTES_S: u32 = 300;
const HOUR_S: u32 = 3600;

/// A question to the history, whose answer needs no events: advice is judged by figures alone.
type Figures<'a> = dyn Fn(&Query) -> Result<Answer, SourceError> + 'a;

/// What to ask for instead.
pub(super) fn recommend(
    figures: &Figures<'_>,
    settings: &Advice,
    now: &Node,
    scope: &Scope,
) -> Result<Recommendations, SourceError> {
    let since_unix_ms = since(now, scope, settings);
    // A workload is judged by all its pods.
    let history = fine_figures(figures, scope, since_unix_ms)?;
    let observed = [Observed { node: now, history: &history }];
    let question = question(now, scope, since_unix_ms);
    let advice = tessera_advice::recommend(&observed, settings, &question);
    if advice.workloads.is_empty() && !scope.pod.is_empty() {
        let since = time_format::utc(since_unix_ms);
        return Err(SourceError::NotFound(format!(
            "no pod {} has a share here, and none had one since {since}; without a name, the answer lists every \
             workload",
            scope.pod
        )));
    }
    Ok(advice)
}

/// Figures for advice. Many neighbours make the history answer in hours, in whose means the minutes vanish in
/// which a pod used much. So those of one pod's namespace are asked for in minutes, too, and have these where
/// they are still kept.
fn fine_figures(
    figures: &Figures<'_>,
    scope: &Scope,
    since_unix_ms: i64,
) -> Result<Answer, SourceError> {
    let query = window(scope, since_unix_ms);
    let all = figures(&query)?;
    if scope.pod.is_empty() || all.step_seconds < HOUR_S {
        return Ok(all);
    }
    // There may be too many for one answer.
    Ok(match figures(&Query { step_seconds: MINUTES_S, ..query }) {
        Ok(fine) => finest(all, fine),
        Err(_) => all,
    })
}

/// What is asked and not used.
pub(super) fn waste(
    figures: &Figures<'_>,
    settings: &Advice,
    now: &Node,
    scope: &Scope,
) -> Result<Waste, SourceError> {
    let since_unix_ms = since(now, scope, settings);
    let history = figures(&window(scope, since_unix_ms))?;
    let observed = [Observed { node: now, history: &history }];
    Ok(tessera_advice::waste(&observed, settings, &question(now, scope, since_unix_ms)))
}

fn since(now: &Node, scope: &Scope, settings: &Advice) -> i64 {
    let window = i64::try_from(settings.window.as_millis()).unwrap_or(i64::MAX);
    match scope.since_unix_ms {
        0 => now.at_unix_ms.saturating_sub(window).max(1),
        since => since,
    }
}

/// Hours as far as there is nothing finer, and minutes from then on.
fn finest(mut hours: Answer, minutes: Answer) -> Answer {
    let hour_ms = i64::from(HOUR_S) * 1000;
    let begins =
        minutes.tenants.iter().filter_map(|series| Some(series.points.first()?.at_unix_ms));
    let Some(first) = begins.min() else { return hours };
    // The first whole hour.
    let from = (first.saturating_add(hour_ms - 1)).div_euclid(hour_ms).saturating_mul(hour_ms);
    for series in &mut hours.tenants {
        series.points.retain(|point| point.at_unix_ms < from);
    }
    for mut series in minutes.tenants {
        series.points.retain(|point| point.at_unix_ms >= from);
        let is_same = |one: &&mut TenantSeries| {
            (&one.id, one.generation, &one.gpu_uuid)
                == (&series.id, series.generation, &series.gpu_uuid)
        };
        match hours.tenants.iter_mut().find(is_same) {
            Some(same) => same.points.append(&mut series.points),
            None => hours.tenants.push(series),
        }
    }
    if hours.tenants.iter().all(|one| one.points.iter().all(|point| point.at_unix_ms >= from)) {
        hours.step_seconds = MINUTES_S;
    }
    hours
}

fn window(scope: &Scope, since_unix_ms: i64) -> Query {
    Query { namespace: scope.namespace.clone(), since_unix_ms, ..Query::default() }
}

fn question<'a>(now: &Node, scope: &'a Scope, since_unix_ms: i64) -> Question<'a> {
    Question {
        namespace: &scope.namespace,
        pod: &scope.pod,
        since_unix_ms,
        now_unix_ms: now.at_unix_ms,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::time::Duration;

    use tessera_view::history::TenantPoint;

    use super::*;

    const HOUR: i64 = 3_600_000;

    fn settings() -> Advice {
        Advice { window: Duration::from_secs(10 * 3600), ..Advice::default() }
    }

    /// A pod that had a share for an hour.
    fn made() -> Answer {
        let point = TenantPoint {
            at_unix_ms: 100 * HOUR,
            seconds: 3600.0,
            memory_peak_bytes: 1 << 30,
            memory_limit_bytes: 8 << 30,
            cores_millis: 250,
            ..TenantPoint::default()
        };
        let series = TenantSeries {
            namespace: "team".into(),
            pod: "chat-0".into(),
            points: vec![point],
            ..TenantSeries::default()
        };
        Answer { tenants: vec![series], ..Answer::default() }
    }

    fn now() -> Node {
        Node { at_unix_ms: 101 * HOUR, ..Node::default() }
    }

    #[test]
    fn the_window_is_the_settings_where_none_is_asked_for() {
        let asked = RefCell::<Vec<Query>>::default();
        let figures = |query: &Query| {
            asked.borrow_mut().push(query.clone());
            Ok(made())
        };
        let scope = Scope { pod: "chat-0".into(), namespace: "team".into(), ..Scope::default() };
        let advice = recommend(&figures, &settings(), &now(), &scope).unwrap();
        assert_eq!(advice.workloads[0].workload, "chat");
        assert_eq!(advice.workloads[0].since_unix_ms, 91 * HOUR);
        let scope = Scope { since_unix_ms: 7, ..scope };
        let waste = waste(&figures, &settings(), &now(), &scope).unwrap();
        assert_eq!((waste.since_unix_ms, waste.namespaces.len()), (7, 1));
        let asked = asked.into_inner();
        let windows: Vec<i64> = asked.iter().map(|query| query.since_unix_ms).collect();
        assert_eq!(windows, [91 * HOUR, 7]);
        // Its neighbours of the same workload are looked at, too.
        assert!(asked.iter().all(|query| query.subject.is_empty() && query.namespace == "team"));
    }

    #[test]
    fn hours_give_way_to_minutes_where_these_are_kept_and_no_hour_is_lost() {
        let series = |id: &str, points: &[(i64, f64)]| {
            let point = |(at, got): &(i64, f64)| TenantPoint {
                at_unix_ms: *at,
                got_seconds: *got,
                ..TenantPoint::default()
            };
            let points = points.iter().map(point).collect();
            TenantSeries { id: id.into(), points, ..TenantSeries::default() }
        };
        let answer = |step_seconds, tenants| Answer { step_seconds, tenants, ..Answer::default() };
        let minute = HOUR / 60;
        let hours = answer(3600, vec![series("a", &[(0, 1.0), (HOUR, 2.0), (2 * HOUR, 3.0)])]);
        // The first hour of minutes is not whole.
        let late = [(HOUR + 30 * minute, 9.0), (2 * HOUR, 250.0), (2 * HOUR + 5 * minute, 0.0)];
        let minutes = answer(300, vec![series("a", &late), series("b", &[(2 * HOUR, 7.0)])]);
        let both = finest(hours.clone(), minutes);
        let of = |nth: usize| {
            let points = both.tenants[nth].points.iter();
            points.map(|point| (point.at_unix_ms, point.got_seconds)).collect::<Vec<_>>()
        };
        let answered = [(0, 1.0), (HOUR, 2.0), (2 * HOUR, 250.0), (2 * HOUR + 5 * minute, 0.0)];
        assert_eq!((of(0), of(1)), (answered.to_vec(), vec![(2 * HOUR, 7.0)]));
        assert_eq!(both.step_seconds, 3600);
        assert_eq!(finest(hours.clone(), answer(300, Vec::new())), hours);
        let whole = answer(300, vec![series("a", &[(0, 1.0), (5 * minute, 4.0)])]);
        assert_eq!(finest(hours, whole.clone()), whole);
    }

    #[test]
    fn a_pod_that_nobody_knows_is_named() {
        let scope = Scope { pod: "chta-0".into(), ..Scope::default() };
        let error = recommend(&|_| Ok(made()), &settings(), &now(), &scope).unwrap_err();
        let SourceError::NotFound(text) = error else { panic!("{error}") };
        assert!(text.contains("no pod chta-0 has a share here"), "{text}");
    }
}
