//! The table of mutants in `docs/correctness.md`, between two markers.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Found, Mutant};

const PATH: &str = "docs/correctness.md";
const BEGIN: &str = "<!-- mutants: begin, written by `cargo x torture --mutants` -->";
const END: &str = "<!-- mutants: end -->";
/// Marks a mutant that was not found.
const MISSED: &str = "| not found";
/// Marks a mutant that a test found.
const TESTED: &str = ") | test |";
const HEAD: &str = "| mutant | what it breaks | found after (of the CPUs) | class, seed | by |\n\
                    |---|---|---|---|---|\n";

/// The class of scenes that found a mutant, and its rate of chaos.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Where {
    pub class: String,
    pub chaos: String,
}

/// The result of one mutant.
#[derive(Debug)]
pub struct Row {
    name: String,
    text: String,
    is_found: bool,
    is_explained: bool,
}

impl Row {
    pub fn new(mutant: &Mutant, found: Option<Found>, cpu: Duration) -> Self {
        let mut breaks = mutant.breaks.clone();
        if mutant.was.is_some() {
            breaks.push_str(" (a defect of earlier versions)");
        }
        if let Some(loom) = &mutant.loom {
            breaks.push_str(&format!(" (passes {loom})"));
        }
        let missed = mutant.missed.as_deref();
        let told = match &found {
            Some(Found { seconds, cpu_seconds, seed, class, message }) => {
                let place = if seed.is_empty() { class } else { &format!("{class}, {seed}") };
                format!("{seconds} s ({cpu_seconds} s) | {place} | {message}")
            }
            None => {
                let missed = missed.unwrap_or("not explained");
                format!("not found ({} s) | | {missed}", cpu.as_secs())
            }
        };
        Self {
            name: mutant.name.clone(),
            text: format!("| {} | {breaks} | {told} |", mutant.name),
            is_found: found.is_some(),
            is_explained: missed.is_some(),
        }
    }

    pub fn is_found(&self) -> bool {
        self.is_found
    }

    pub fn is_explained(&self) -> bool {
        self.is_explained
    }
}

/// Replaces the rows of the same mutants; removes rows of mutants that no longer exist.
pub fn update(root: &Path, rows: &[Row]) -> Result<()> {
    let path = root.join(PATH);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {PATH}"))?;
    let names: Vec<String> =
        super::patch::all(root)?.into_iter().map(|mutant| mutant.name).collect();
    let after = with_rows(&text, rows, &names)?;
    if after != text {
        fs::write(&path, after).with_context(|| format!("cannot write {PATH}"))?;
    }
    Ok(())
}

/// Returns the names in the table, and whether it lists them as found.
pub fn known(root: &Path) -> Result<BTreeMap<String, bool>> {
    let text =
        fs::read_to_string(root.join(PATH)).with_context(|| format!("cannot read {PATH}"))?;
    let (_, table, _) = parts(&text)?;
    Ok(lines(table).map(|(name, line)| (name.to_owned(), !line.contains(MISSED))).collect())
}

/// Returns the class of scenes and the rate of chaos with which each mutant was found, by name.
pub fn found(root: &Path) -> Result<BTreeMap<String, Where>> {
    let text =
        fs::read_to_string(root.join(PATH)).with_context(|| format!("cannot read {PATH}"))?;
    let (_, table, _) = parts(&text)?;
    let rows = lines(table).filter(|(_, line)| !line.contains(MISSED));
    Ok(rows.filter_map(|(name, line)| Some((name.to_owned(), found_in(line)?))).collect())
}

fn found_in(line: &str) -> Option<Where> {
    let place = line.split('|').nth(4)?.trim();
    let (class, rest) = place.split_once(", ")?;
    let chaos = rest.rsplit_once("chaos ")?.1;
    Some(Where { class: class.to_owned(), chaos: chaos.to_owned() })
}

/// Returns the text before the table, the table, and the text after it.
fn parts(text: &str) -> Result<(&str, &str, &str)> {
    let (before, rest) = text.split_once(BEGIN).with_context(|| format!("no `{BEGIN}`"))?;
    let (table, after) = rest.split_once(END).with_context(|| format!("no `{END}`"))?;
    Ok((before, table, after))
}

/// The name in each line of the table, and the line.
fn lines(table: &str) -> impl Iterator<Item = (&str, &str)> {
    let rows = table.lines().filter(|line| line.starts_with("| "));
    rows.map(|line| (line[2..].split(" |").next().unwrap_or_default(), line))
}

/// Returns `true` if the mutant was found within a minute, or a minute of CPU time: with two CPUs
/// for torture alone that takes less than a minute.
fn is_quick(line: &str) -> bool {
    let told = line.split('|').nth(3).unwrap_or_default();
    let mut seconds = told.split([' ', '(']).filter_map(|word| word.parse::<u64>().ok());
    !line.contains(MISSED) && seconds.any(|seconds| seconds <= 60)
}

fn with_rows(text: &str, rows: &[Row], names: &[String]) -> Result<String> {
    let (before, table, after) = parts(text)?;
    let mut all = BTreeMap::new();
    for (name, line) in lines(table) {
        if names.iter().any(|other| other == name) {
            all.insert(name.to_owned(), line.to_owned());
        }
    }
    all.extend(rows.iter().map(|row| (row.name.clone(), row.text.clone())));
    let missed = all.values().filter(|line| line.contains(MISSED)).count();
    let tested = all.values().filter(|line| line.contains(TESTED)).count();
    let quick = all.values().filter(|line| is_quick(line)).count();
    let (found, all_of_them) = (all.len() - missed, all.len());
    let mut count = format!(
        "{found} of {all_of_them} mutants are found, {tested} of them by a test of the library, \
         {quick} within 60 s",
    );
    if names.len() > all.len() {
        count.push_str(&format!("; {} more were not run yet", names.len() - all.len()));
    }
    count.push('.');
    let lines: Vec<String> = all.into_values().collect();
    Ok(format!("{before}{BEGIN}\n\n{count}\n\n{HEAD}{}\n\n{END}{after}", lines.join("\n")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, found: bool) -> Row {
        let mutant =
            Mutant { name: name.to_owned(), breaks: "reads".to_owned(), ..Mutant::default() };
        let found = found.then(|| Found {
            seconds: 3,
            cpu_seconds: 4,
            seed: "7, chaos 1:2".to_owned(),
            class: "Cuts".to_owned(),
            message: "saw".to_owned(),
        });
        Row::new(&mutant, found, Duration::from_secs(9))
    }

    #[test]
    fn a_minute_of_the_cpus_is_quick_on_a_busy_machine() {
        let is_quick = |told: &str| is_quick(&format!("| a | reads | {told} | | saw |"));
        assert!(is_quick("60 s") && is_quick("90 s (40 s)"));
        assert!(!is_quick("61 s") && !is_quick("90 s (70 s)") && !is_quick("not found (9 s)"));
    }

    #[test]
    fn a_row_tells_where_its_mutant_was_found() {
        let at = |class: &str, chaos: &str| {
            Some(Where { class: class.to_owned(), chaos: chaos.to_owned() })
        };
        let line = "| a | reads | 3 s (4 s) | maps, 1018, chaos 1:2000 | read 4 of 5 bytes |";
        assert_eq!(found_in(line), at("maps", "1:2000"));
        assert_eq!(found_in("| a | reads | 3 s (4 s) | test | maps::stores |"), None);
    }

    #[test]
    fn rows_are_replaced_added_and_forgotten() {
        let empty = format!("before\n{BEGIN}\n{END}\nafter\n");
        let names =
            |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let (both, one) = (names(&["a", "gone"]), names(&["a"]));
        let first = with_rows(&empty, &[row("a", false), row("gone", true)], &both).unwrap();
        assert!(
            first.contains(
                "1 of 2 mutants are found, 0 of them by a test of the library, 1 within 60 s."
            ),
            "{first}"
        );
        let second = with_rows(&first, &[row("a", true)], &one).unwrap();
        assert!(second.starts_with("before\n") && second.ends_with("\nafter\n"), "{second}");
        assert!(
            second.contains("1 of 1 mutants are found, 0 of") && !second.contains("gone"),
            "{second}"
        );
        assert!(
            second.contains("| a | reads | 3 s (4 s) | Cuts, 7, chaos 1:2 | saw |"),
            "{second}"
        );
        assert_eq!(with_rows(&second, &[row("a", true)], &one).unwrap(), second);
        assert!(with_rows("no markers", &[], &one).is_err());
    }
}
