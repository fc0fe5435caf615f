//! Messages of this program and the cache: to standard error, to a file, or to the system's log.
//!
//! # Safety
//! The C library's `openlog` and `syslog` get strings that end with a zero byte. That of `openlog`
//! is static, because the library keeps the pointer.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context, Result};
use log::{Level, LevelFilter, Metadata, Record};
use parking_lot::RwLock;

const PROGRAM: &str = "bifolio-mount";
const IDENTITY: &CStr = c"bifolio-mount";

/// Logs warnings and errors to the current destination.
static MESSAGES: Messages = Messages { destination: RwLock::new(Destination::StandardError) };

struct Messages {
    destination: RwLock<Destination>,
}

enum Destination {
    StandardError,
    /// Each line has its time.
    File(File),
    Syslog,
}

/// Sends messages to standard error, or to a file.
pub fn start(file: Option<&Path>) -> Result<()> {
    if let Some(path) = file {
        let mut options = OpenOptions::new();
        let file = options.append(true).create(true).mode(0o640).open(path);
        let file = file.with_context(|| format!("cannot open the log {}", path.display()))?;
        *MESSAGES.destination.write() = Destination::File(file);
    }
    log::set_logger(&MESSAGES).map(|()| log::set_max_level(LevelFilter::Warn)).ok();
    Ok(())
}

/// Sends messages to the system's log from now on, unless they go to a file: standard error is that
/// of a program that does not wait for them.
pub fn leave_standard_error() {
    let mut destination = MESSAGES.destination.write();
    if matches!(*destination, Destination::StandardError) {
        // SAFETY: the string is static and ends with a zero byte.
        unsafe { libc::openlog(IDENTITY.as_ptr(), libc::LOG_PID, libc::LOG_DAEMON) };
        *destination = Destination::Syslog;
    }
    std::panic::set_hook(Box::new(|panic| log::error!("{panic}")));
}

/// Says on standard error, too, why the program fails.
pub fn report_failure(error: &anyhow::Error) {
    log::error!("{error:#}");
    if !matches!(*MESSAGES.destination.read(), Destination::StandardError) {
        eprintln!("{PROGRAM}: {error:#}");
    }
}

impl log::Log for Messages {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Warn && metadata.target().starts_with("bifolio")
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let text = record.args();
        // A message that cannot be written is lost: there is no other place for it.
        let _ = match &*self.destination.read() {
            Destination::StandardError => {
                std::io::stderr().write_all(format!("{PROGRAM}: {text}\n").as_bytes())
            }
            Destination::File(file) => {
                let time = humantime::format_rfc3339_seconds(SystemTime::now());
                let line = format!("{time} {PROGRAM}[{}]: {text}\n", std::process::id());
                (&*file).write_all(line.as_bytes())
            }
            Destination::Syslog => {
                send_to_syslog(record.level(), text.to_string());
                Ok(())
            }
        };
    }

    fn flush(&self) {}
}

fn send_to_syslog(level: Level, text: String) {
    let priority = if level == Level::Error { libc::LOG_ERR } else { libc::LOG_WARNING };
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // SAFETY: the format takes one string, which ends with a zero byte and lives until the return.
    unsafe { libc::syslog(priority, c"%s".as_ptr(), text.as_ptr()) };
}
