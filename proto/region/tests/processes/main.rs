//! The promises of accounting, tried on real processes that are killed at random moments.
//!
//! This binary runs itself: with `child:ROLE` as its first argument it is a tenant's process of one
//! of the scenarios. Another argument selects scenarios by a part of their names.

mod rounds;
mod short;
mod support;

use std::time::Instant;

/// A scenario panics, or returns figures worth showing.
type Scenario = (&'static str, fn() -> String);

const SCENARIOS: &[Scenario] = &[
    ("none_that_fits_is_refused_and_none_passes_the_limit", rounds::run),
    ("without_descriptors_requests_are_still_judged", short::starved),
    ("a_full_file_system_is_said_and_leaves_nothing", short::full),
];

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(role) = arguments.first().and_then(|first| first.strip_prefix("child:")) {
        support::die_with_parent();
        let dir = std::path::Path::new(&arguments[1]);
        return match role {
            "rounds" => rounds::child(dir, arguments[2].parse().unwrap()),
            "starved" => short::starve(dir),
            "full" => short::fill(dir),
            _ => panic!("no role {role}"),
        };
    }
    let filter = arguments.iter().find(|argument| !argument.starts_with('-'));
    let chosen = |name: &str| filter.is_none_or(|filter| name.contains(filter.as_str()));
    let mut ran = 0;
    for (name, scenario) in SCENARIOS.iter().filter(|(name, _)| chosen(name)) {
        let start = Instant::now();
        let figures = scenario();
        println!("test {name} ... ok ({:.1} s) {figures}", start.elapsed().as_secs_f64());
        ran += 1;
    }
    println!("\ntest result: ok. {ran} passed\n");
}
