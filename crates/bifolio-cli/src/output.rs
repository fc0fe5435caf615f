//! The only way to standard output and standard error.
//!
//! A reader that goes away (`bifolio features | head -1`) is an error like any other here; `main`
//! ends quietly on it. The macros of the standard library would panic.

use std::io::{self, Write};

use anyhow::Context;

/// Writes `text` as it is.
pub(crate) fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).context("write to standard output")?;
    stdout.flush().context("write to standard output")
}

/// Writes one line to standard error, where a failure has nowhere to be told.
pub(crate) fn complain(message: &str) {
    let line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    let _ = writeln!(io::stderr(), "bifolio: {line}");
}

/// Whether standard output's reader went away.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    })
}
