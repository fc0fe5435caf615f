//! Output of a program that runs one benchmark, as those of engines are. (`bifolio bench`, which
//! runs many, has a progress bar and writes one report per line.)

use std::fs;
use std::io::Write;
use std::path::Path;

use crate::error::{Error, Result};
use crate::progress::Progress;
use bifolio_report::Report;

/// Prints the messages of a benchmark on standard error, one to a line.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lines;

impl Progress for Lines {
    fn say(&mut self, line: &str) {
        eprintln!("{line}");
    }

    fn start(&mut self, phase: &str, _steps: u64) {
        eprintln!("{phase}");
    }

    fn advance(&mut self, _steps: u64) {}
}

/// Writes the report as JSON to the file `json`, or to standard output if that is `-`. Prints it as
/// `text` on standard output otherwise.
///
/// # Errors
/// The file or standard output cannot be written.
pub fn deliver(
    report: &Report,
    json: Option<&Path>,
    text: impl FnOnce(&Report) -> String,
) -> Result<()> {
    let envelope = || {
        let envelope = serde_json::to_string(report);
        envelope.map(|envelope| envelope + "\n").map_err(Error::system("print the report as JSON"))
    };
    let printed = match json {
        Some(path) if path.as_os_str() == "-" => envelope()?,
        Some(path) => {
            let failed = Error::system(format!("write {}", path.display()));
            fs::write(path, envelope()?).map_err(failed)?;
            text(report)
        }
        None => text(report),
    };
    let failed = Error::system("write to standard output");
    std::io::stdout().write_all(printed.as_bytes()).map_err(failed)
}
