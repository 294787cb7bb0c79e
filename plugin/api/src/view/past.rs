//! What the history answers, and the advice that follows from it.

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

/// A history of this node. Blocking: it reads files. `now` is the node at this moment.
pub trait Past: Send + Sync + 'static {
    /// What was, with what happened.
    fn history(&self, now: &Node, query: &Query) -> Result<Answer, SourceError>;

    /// What was, without what happened: advice is judged by figures alone.
    fn figures(&self, now: &Node, query: &Query) -> Result<Answer, SourceError>;

    /// What advice is judged by now.
    fn settings(&self) -> Advice;

    /// What to ask for instead.
    fn recommend(&self, now: &Node, scope: &Scope) -> Result<Recommendations, SourceError> {
        let settings = self.settings();
        let since_unix_ms = since(now, scope, &settings);
        // A workload is judged by all its pods.
        let history = self.fine_figures(now, scope, since_unix_ms)?;
        let observed = [Observed { node: now, history: &history }];
        let question = question(now, scope, since_unix_ms);
        let advice = tessera_advice::recommend(&observed, &settings, &question);
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
        &self,
        now: &Node,
        scope: &Scope,
        since_unix_ms: i64,
    ) -> Result<Answer, SourceError> {
        let query = window(scope, since_unix_ms);
        let all = self.figures(now, &query)?;
        if scope.pod.is_empty() || all.step_seconds < HOUR_S {
            return Ok(all);
        }
        // There may be too many for one answer.
        Ok(match self.figures(now, &Query { step_seconds: MINUTES_S, ..query }) {
            Ok(fine) => finest(all, fine),
            Err(_) => all,
        })
    }

    /// What is asked and not used.
    fn waste(&self, now: &Node, scope: &Scope) -> Result<Waste, SourceError> {
        let settings = self.settings();
        let since_unix_ms = since(now, scope, &settings);
        let history = self.figures(now, &window(scope, since_unix_ms))?;
        let observed = [Observed { node: now, history: &history }];
        Ok(tessera_advice::waste(&observed, &settings, &question(now, scope, since_unix_ms)))
    }
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
    use std::sync::Mutex;
    use std::time::Duration;

    use tessera_view::history::TenantPoint;

    use super::*;

    const HOUR: i64 = 3_600_000;

    /// A pod that had a share for an hour, and what was asked about it.
    #[derive(Default)]
    struct Made(Mutex<Vec<Query>>);

    impl Past for Made {
        fn history(&self, _: &Node, query: &Query) -> Result<Answer, SourceError> {
            panic!("advice needs no events: {query:?}")
        }

        fn figures(&self, _: &Node, query: &Query) -> Result<Answer, SourceError> {
            self.0.lock().unwrap().push(query.clone());
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
            Ok(Answer { tenants: vec![series], ..Answer::default() })
        }

        fn settings(&self) -> Advice {
            Advice { window: Duration::from_secs(10 * 3600), ..Advice::default() }
        }
    }

    fn now() -> Node {
        Node { at_unix_ms: 101 * HOUR, ..Node::default() }
    }

    #[test]
    fn the_window_is_the_settings_where_none_is_asked_for() {
        let made = Made::default();
        let scope = Scope { pod: "chat-0".into(), namespace: "team".into(), ..Scope::default() };
        let advice = made.recommend(&now(), &scope).unwrap();
        assert_eq!(advice.workloads[0].workload, "chat");
        assert_eq!(advice.workloads[0].since_unix_ms, 91 * HOUR);
        let waste = made.waste(&now(), &Scope { since_unix_ms: 7, ..scope }).unwrap();
        assert_eq!((waste.since_unix_ms, waste.namespaces.len()), (7, 1));
        let asked = made.0.lock().unwrap();
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
        let error = Made::default().recommend(&now(), &scope).unwrap_err();
        let SourceError::NotFound(text) = error else { panic!("{error}") };
        assert!(text.contains("no pod chta-0 has a share here"), "{text}");
    }
}
