//! The machine, as the report describes it.
//!
//! Read once at the start of a run from /proc, /sys and uname. A fact that the machine does not
//! report is an empty text or a zero, never a guess.

use std::fs;

use bifolio_report::{FeatureUse, Host};

/// Reads the facts; `file_system` is that of the workspace.
pub(crate) fn read(file_system: &str) -> Host {
    let uname = rustix::system::uname();
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    Host {
        cpu: cpu_name(&cpuinfo),
        cpu_family: cpu_number(&cpuinfo, "cpu family").unwrap_or(0),
        cpu_model: cpu_number(&cpuinfo, "model").unwrap_or(0),
        copy: if cfg!(target_arch = "x86_64") { "memcpy" } else { "words" }.into(),
        cpus: crate::harness::cpus::allowed().len(),
        arch: std::env::consts::ARCH.into(),
        kernel: format!(
            "{} {}",
            uname.sysname().to_string_lossy(),
            uname.release().to_string_lossy()
        ),
        memory_bytes: kibibytes_field(&meminfo, "MemTotal").unwrap_or(0),
        file_system: file_system.to_owned(),
        virtualised: virtualised(&cpuinfo),
    }
}

/// Returns what the library found when it probed the kernel.
pub(crate) fn features() -> Vec<FeatureUse> {
    let used = |feature: bifolio::FeatureReport| FeatureUse {
        name: feature.name.to_owned(),
        in_use: feature.in_use,
        reason: feature.reason,
        fallback: feature.fallback.to_owned(),
    };
    bifolio::features().into_iter().map(used).collect()
}

/// Returns the command line of this process, quoted for a shell.
pub(crate) fn command_line() -> String {
    let quoted = |argument: std::ffi::OsString| {
        let text = argument.to_string_lossy().into_owned();
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./=:,+".contains(&byte);
        if !text.is_empty() && text.bytes().all(is_plain) {
            return text;
        }
        format!("'{}'", text.replace('\'', r"'\''"))
    };
    std::env::args_os().map(quoted).collect::<Vec<_>>().join(" ")
}

/// The value of a `name: N kB` line, in bytes.
pub(crate) fn kibibytes_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The first value of a `name : value` line.
fn cpu_field(cpuinfo: &str, name: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.split(':').next().unwrap_or("").trim() == name);
    line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned())
}

fn cpu_number(cpuinfo: &str, name: &str) -> Option<u32> {
    cpu_field(cpuinfo, name)?.parse().ok()
}

/// x86 and most others say `model name`; Arm only numbers its implementers and parts.
fn cpu_name(cpuinfo: &str) -> String {
    let field = |name| cpu_field(cpuinfo, name);
    let number = |name| cpu_number(cpuinfo, name);
    if let (Some(name), Some(family), Some(model)) =
        (field("model name"), number("cpu family"), number("model"))
    {
        return format!("{name} (family {family}, model {model})");
    }
    field("model name").or_else(|| field("cpu")).unwrap_or_else(|| {
        let part = field("CPU part").unwrap_or_default();
        let implementer = field("CPU implementer").unwrap_or_default();
        format!("{implementer} {part}").trim().to_owned()
    })
}

fn virtualised(cpuinfo: &str) -> bool {
    let flagged = cpuinfo
        .lines()
        .any(|line| line.starts_with("flags") && line.split(' ').any(|flag| flag == "hypervisor"));
    let vendor = fs::read_to_string("/sys/class/dmi/id/sys_vendor").unwrap_or_default();
    let virtual_vendor =
        ["QEMU", "VMware", "Xen", "innotek", "Amazon EC2", "Google", "Microsoft Corporation"]
            .iter()
            .any(|name| vendor.starts_with(name));
    flagged || virtual_vendor || fs::exists("/sys/hypervisor/type").unwrap_or(false)
}
