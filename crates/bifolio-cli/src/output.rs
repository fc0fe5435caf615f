//! The only way to standard output and standard error.
//!
//! A closed pipe (`bifolio features | head -1`) is an ordinary error here, on which `main` ends
//! quietly. The macros of the standard library would panic.

use std::io::{self, Write};

use anyhow::Context;

/// Writes `text` unchanged.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).context("write to standard output")?;
    stdout.flush().context("write to standard output")
}

/// Writes one line to standard error; a failure of that is ignored.
pub(crate) fn complain(message: &str) {
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    let _ = writeln!(io::stderr(), "bifolio: {line}");
}

/// Returns `true` if standard output is a closed pipe.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    })
}
