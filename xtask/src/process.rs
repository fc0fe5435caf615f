//! Programs other than cargo: run for their effect, or for what they print.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Prints the command and runs it.
pub fn run(command: &mut Command) -> Result<()> {
    eprintln!("$ {}", format!("{command:?}").replace('"', ""));
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Prints the command, runs it, and returns its standard output, which is also passed on at once.
pub fn run_and_read(command: &mut Command) -> Result<String> {
    eprintln!("$ {}", format!("{command:?}").replace('"', ""));
    command.stdout(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    let output = child.stdout.take().context("the program has no standard output")?;
    read_to_end(child, output, std::io::stdout().lock(), &format!("{command:?}"))
}

/// Prints the command, runs it, and returns its standard error, which is also passed on at once.
pub fn run_and_read_errors(command: &mut Command) -> Result<String> {
    eprintln!("$ {}", format!("{command:?}").replace('"', ""));
    command.stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    let output = child.stderr.take().context("the program has no standard error")?;
    read_to_end(child, output, std::io::stderr().lock(), &format!("{command:?}"))
}

/// Reads what a program prints, and waits for its end.
fn read_to_end(
    mut child: Child,
    output: impl Read,
    shown: impl Write,
    name: &str,
) -> Result<String> {
    let copied = copy_through(output, shown);
    let status = child.wait().with_context(|| format!("cannot wait for {name}"))?;
    let text = copied.with_context(|| format!("cannot pass on what {name} printed"))?;
    ensure!(status.success(), "{name}: {status}");
    Ok(text)
}

/// Runs the command and returns its standard output; what it says of errors is passed on.
pub fn output(command: &mut Command) -> Result<String> {
    command.stderr(Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", output.status);
    String::from_utf8(output.stdout).with_context(|| format!("{command:?} printed no text"))
}

/// Copies chunk by chunk instead of line by line: the name of a test that hangs has no line end
/// yet.
pub fn copy_through(mut from: impl Read, mut out: impl Write) -> std::io::Result<String> {
    let (mut all, mut chunk) = (Vec::new(), [0; 4096]);
    loop {
        let length = from.read(&mut chunk)?;
        if length == 0 {
            return Ok(String::from_utf8_lossy(&all).into_owned());
        }
        out.write_all(&chunk[..length])?;
        out.flush()?;
        all.extend_from_slice(&chunk[..length]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captured_output_is_passed_on_and_returned_complete() {
        let printed = "test loom_pin ... ok\n".repeat(1000);
        let mut shown = Vec::new();
        assert_eq!(copy_through(printed.as_bytes(), &mut shown).unwrap(), printed);
        assert_eq!(shown, printed.as_bytes());
    }
}
