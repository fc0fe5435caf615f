//! `cargo x torture --mutants --sample N`: N mutants, others each day, so that torture cannot lose
//! its power unseen for long.
//!
//! Called by `step`. Tried are the mutants of which the table in `docs/correctness.md` says where
//! torture finds them, in scenes of that class and at that rate of chaos, which takes less time
//! than all scenes; and those that name a test. One that is not found gets three times the time,
//! then the run fails. [`RECORD`] has the day and the tree where each was found last.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};

use super::patch::{self, Mutant};
use super::table::{self, Where};
use super::{Found, Place, SLICE};
use crate::cargo::workspace_root;
use crate::process;

/// The record: a line for each mutant.
const RECORD: &str = "crates/bifolio-torture/mutants/found.txt";
const HEAD: &str = "# Day, tree and seconds where `cargo x torture --mutants --sample` found each \
                    mutant last.\n";
/// Factor of the time of the second try.
const SECOND_TRY: u32 = 3;
/// Time after which no further mutant is begun: on a slow machine a sample is smaller.
const BEGIN_WITHIN: Duration = Duration::from_secs(150);

/// Tries `count` mutants, those of the day `seed`; of today unless given. With `records`, notes
/// which were found.
pub fn run(count: usize, seed: Option<u64>, records: bool) -> Result<()> {
    let root = workspace_root();
    let day = seed.map_or_else(today, Ok)?;
    patch::check(&root)?;
    let places = table::found(&root)?;
    let mut mutants = patch::all(&root)?;
    mutants.retain(|mutant| mutant.test.is_some() || places.contains_key(&mutant.name));
    ensure!(!mutants.is_empty(), "the table says of no mutant where it is found");
    let place = Place::new(&root)?;
    let (mut missed, mut found) = (Vec::new(), BTreeMap::new());
    let chosen: Vec<_> =
        chosen(mutants.len(), count, day).into_iter().map(|number| &mutants[number]).collect();
    if chosen.iter().any(|mutant| mutant.test.is_none()) {
        // The dependencies, which are built once, take none of the time.
        place.build().context("the sources without a mutant")?;
    }
    let begun = Instant::now();
    for mutant in chosen {
        eprint!("{}: ", mutant.name);
        if begun.elapsed() > BEGIN_WITHIN {
            eprintln!("not tried: {BEGIN_WITHIN:?} are over");
            continue;
        }
        match judge(&place, mutant, places.get(&mutant.name), day)? {
            Some(Found { seconds, class, message, .. }) => {
                eprintln!("{seconds} s, {class}: {message}");
                found.insert(mutant.name.clone(), format!("{seconds} s, {class}"));
            }
            None => {
                eprintln!("NOT FOUND");
                missed.push(mutant.name.as_str());
            }
        }
    }
    if records {
        record(&root, &found)?;
    }
    ensure!(missed.is_empty(), "torture no longer finds {}", missed.join(", "));
    Ok(())
}

/// Returns the numbers of the mutants of a day: in as many days as it takes, each one.
fn chosen(mutants: usize, count: usize, day: u64) -> Vec<usize> {
    let first = (day % mutants as u64) as usize * count;
    (first..first + count.min(mutants)).map(|number| number % mutants).collect()
}

/// Days since 1970.
fn today() -> Result<u64> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(since.as_secs() / (24 * 60 * 60))
}

/// Runs the test that a mutant names, or torture, at most twice.
fn judge(place: &Place, mutant: &Mutant, known: Option<&Where>, day: u64) -> Result<Option<Found>> {
    if mutant.test.is_some() {
        return Ok(place.judge(mutant)?.0);
    }
    place.with(mutant, || {
        place.build()?;
        let Where { class, chaos } = known.context("a mutant without a place")?;
        for (number, factor) in [(0, 1), (1, SECOND_TRY)] {
            let (seed, mut cpu) = (10_000 * (day + 1) + 1000 * number, Duration::ZERO);
            let begun = Instant::now();
            if let Some(mut found) =
                place.slice(Some(class), seed, chaos, SLICE * factor, &mut cpu)?
            {
                found.seconds = begun.elapsed().as_secs().max(1);
                return Ok(Some(found));
            }
            eprint!("not in {} s of the CPUs ... ", cpu.as_secs());
        }
        Ok(None)
    })
}

/// Replaces the lines of the mutants that were found.
fn record(root: &Path, found: &BTreeMap<String, String>) -> Result<()> {
    let told = |arguments: &[&str]| {
        process::output(Command::new(arguments[0]).args(&arguments[1..]).current_dir(root))
    };
    let day = told(&["date", "-u", "+%F"])?;
    let tree = told(&["git", "describe", "--always", "--dirty", "--exclude=*"])?;
    let known = fs::read_to_string(root.join(RECORD)).unwrap_or_default();
    let names = patch::all(root)?.into_iter().map(|mutant| mutant.name).collect::<Vec<_>>();
    let text = with_lines(&known, found, &names, day.trim(), tree.trim());
    fs::write(root.join(RECORD), text).with_context(|| format!("cannot write {RECORD}"))
}

fn with_lines(
    known: &str,
    found: &BTreeMap<String, String>,
    names: &[String],
    day: &str,
    tree: &str,
) -> String {
    let known = known.lines().filter(|line| !line.starts_with('#'));
    let mut lines: BTreeMap<&str, String> =
        known.filter_map(|line| Some((line.split_once(':')?.0, line.to_owned()))).collect();
    for (name, told) in found {
        lines.insert(name, format!("{name}: {day}, {tree}, {told}"));
    }
    lines.retain(|name, _| names.iter().any(|other| other == name));
    lines.into_values().fold(HEAD.to_owned(), |text, line| text + &line + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutant_is_tried_within_as_many_days_as_it_takes() {
        for (mutants, count) in [(57, 3), (56, 3), (2, 3), (10, 3)] {
            let days = (mutants as u64).div_ceil(count as u64).max(1);
            for first in [0, 20_785] {
                let all = (first..first + days).flat_map(|day| chosen(mutants, count, day));
                let mut all: Vec<usize> = all.collect();
                all.sort_unstable();
                all.dedup();
                assert_eq!(all.len(), mutants, "{mutants} {count} from day {first}");
            }
        }
        assert_eq!(chosen(10, 3, 4), chosen(10, 3, 4));
    }

    #[test]
    fn the_record_keeps_the_last_day_of_each_mutant() {
        let found = |names: &[&str]| -> BTreeMap<String, String> {
            names.iter().map(|name| ((*name).to_owned(), "3 s, maps".to_owned())).collect()
        };
        let names = ["a", "b"].map(str::to_owned);
        let first = with_lines("", &found(&["a", "b", "gone"]), &names, "2026-11-28", "1ee6324e");
        assert!(!first.contains("gone"), "{first}");
        let second = with_lines(&first, &found(&["b"]), &names, "2026-11-29", "9f3f2b4");
        let lines = "a: 2026-11-28, 1ee6324e, 3 s, maps\nb: 2026-11-29, 9f3f2b4, 3 s, maps\n";
        assert_eq!(second, format!("{HEAD}{lines}"));
    }
}
