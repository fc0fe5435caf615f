//! `bifolio compare`: two files of `bifolio bench --json` beside each other.

use std::fs;
use std::path::Path;

use anyhow::Context;

use crate::cli::CompareOptions;
use crate::output;

/// Rows of the second file are worse beyond noise.
#[derive(Debug, thiserror::Error)]
#[error("rows that are worse beyond noise: {0}")]
pub(crate) struct Worse(usize);

/// Prints what changed.
pub(crate) fn run(options: &CompareOptions) -> anyhow::Result<()> {
    let read =
        |path: &Path| fs::read_to_string(path).with_context(|| format!("read {}", path.display()));
    let [first, second] = [&options.first, &options.second].map(|path| path.to_string_lossy());
    let texts = [read(&options.first)?, read(&options.second)?];
    let change_min = options.at_least / 100.0;
    let found = bifolio_report::compare((&first, &texts[0]), (&second, &texts[1]), change_min)
        .map_err(anyhow::Error::msg)?;
    output::print(&found.text)?;
    if found.worse == 0 { Ok(()) } else { Err(Worse(found.worse).into()) }
}
