//! Traces that were recorded: the text format of `bench hit-ratio --trace FILE`.
//!
//! One reference a line, in order: the number of a page of 4096 bytes, or the number of the first
//! page and how many pages follow each other, separated by a blank or a comma. Empty lines, and
//! lines that start with `#`, are skipped.
//!
//! ```text
//! # pages of a database file
//! 17
//! 4096 8
//! 17
//! ```

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use crate::error::{Error, Result};

/// References to pages; those of a recorded trace are numbered from 0 on in the order of their
/// first use.
#[derive(Debug, Default)]
pub(super) struct Trace {
    /// The value of the key `trace` in reports.
    pub(super) name: String,
    pub(super) references: Vec<u32>,
    /// Number of different pages.
    pub(super) pages: u32,
}

/// Upper bound on references, so that a model's numbers have 32 bits.
const REFERENCES_MAX: usize = 1 << 30;

/// Reads a trace.
pub(super) fn read(path: &Path) -> Result<Trace> {
    let file = File::open(path).map_err(Error::system(format!("open {}", path.display())))?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Trace { name, ..parse(BufReader::new(file), &path.display().to_string())? })
}

fn parse(text: impl BufRead, shown: &str) -> Result<Trace> {
    let mut trace = Trace::default();
    let mut numbers = HashMap::new();
    for (line_number, line) in (1..).zip(text.lines()) {
        let line = line.map_err(Error::system(format!("read {shown}")))?;
        let Some((first, count)) = reference(&line).map_err(|reason| {
            Error::Refused(format!("{shown}, line {line_number}: {reason}: {line}"))
        })?
        else {
            continue;
        };
        for page in first..first + count {
            let next = numbers.len() as u32;
            trace.references.push(*numbers.entry(page).or_insert(next));
        }
        if trace.references.len() > REFERENCES_MAX {
            return Err(Error::Refused(format!("{shown}: more than 2^30 references")));
        }
    }
    trace.pages = numbers.len() as u32;
    if trace.pages == 0 {
        return Err(Error::Refused(format!("{shown}: no references")));
    }
    Ok(trace)
}

/// Parses a line: the first page and the number of pages; `None` if there is nothing to parse.
fn reference(line: &str) -> Result<Option<(u64, u64)>, &'static str> {
    let line = line.trim();
    if line.is_empty() || line.starts_with('#') {
        return Ok(None);
    }
    let mut words = line.split([' ', '\t', ',']).filter(|word| !word.is_empty());
    let mut number = || words.next().map(|word| word.parse::<u64>().map_err(|_| "not a number"));
    let first = number().transpose()?.ok_or("no page")?;
    let count = number().transpose()?.unwrap_or(1);
    if words.next().is_some() {
        return Err("more than a page and a count");
    }
    let is_sane = (1..=REFERENCES_MAX as u64).contains(&count);
    if is_sane && first < 1 << 52 { Ok(Some((first, count))) } else { Err("out of range") }
}
