//! The program as `mount` starts it: `mount -t fuse.bifolio`, or a line of `/etc/fstab`.
//!
//! `mount(8)` looks for `/sbin/mount.fuse.bifolio`, which is a link to this program, and passes
//! `SOURCE TARGET [-sfnv] [-o OPTION,...] [-t TYPE]`. Each option of the program is one of `-o`,
//! with `-` or `_`: `-o memory=1G,kernel_cache`. Options that say nothing to a FUSE file system, or
//! that hold for every mount by this program, are accepted.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::{CommandFactory, Parser};

use crate::Options;

/// Options for programs that read `/etc/fstab`, and for others than this file system. `nodev` and
/// `nosuid` hold always, and access times are those of `noatime`.
const ACCEPTED: &[&str] = &[
    "rw",
    "defaults",
    "auto",
    "noauto",
    "nofail",
    "_netdev",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "dev",
    "nodev",
    "suid",
    "nosuid",
    "exec",
    "async",
    "atime",
    "noatime",
    "diratime",
    "nodiratime",
    "relatime",
    "norelatime",
    "lazytime",
    "nolazytime",
    "silent",
    "loud",
    "default_permissions",
    "background",
];

/// Returns `true` if `mount` has started the program.
pub fn is_asked(program: &OsStr) -> bool {
    let name = Path::new(program).file_name().and_then(OsStr::to_str);
    name.is_some_and(|name| name.starts_with("mount."))
}

/// Converts the arguments that `mount` gives. `None` if it asks for no mount (`--fake`).
pub fn options(arguments: &[OsString]) -> Result<Option<Options>> {
    let mut converted: Vec<OsString> = vec!["bifolio-mount".into(), "--background".into()];
    let mut places = Vec::new();
    let (mut is_fake, mut is_sloppy) = (false, false);
    let mut asked = String::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.to_str() {
            Some("-o") => {
                let value = rest.next().and_then(|value| value.to_str());
                let value = value.context("-o needs options, in UTF-8")?;
                asked = if asked.is_empty() { value.into() } else { format!("{asked},{value}") };
            }
            Some("-t") => drop(rest.next()),
            Some("-N") => bail!("-N: a mount in another namespace is not served"),
            Some(flags) if flags.starts_with('-') && flags.len() > 1 => {
                is_fake |= flags.contains('f');
                is_sloppy |= flags.contains('s');
            }
            _ => places.push(argument.clone()),
        }
    }
    for option in asked.split(',').filter(|option| !option.is_empty()) {
        match convert(option) {
            Ok(option) => converted.extend(option),
            Err(_) if is_sloppy => {}
            Err(error) => return Err(error),
        }
    }
    converted.push("--".into());
    converted.extend(places);
    Ok((!is_fake).then(|| Options::parse_from(converted)))
}

/// Converts an option: to an option of the program, or to nothing.
fn convert(option: &str) -> Result<Option<OsString>> {
    let (name, value) = option.split_once('=').unzip();
    let name = name.unwrap_or(option);
    if name == "remount" {
        bail!("a mount cannot be changed: umount it, then mount it again with other options");
    }
    if ACCEPTED.contains(&option) || name.starts_with("x-") || matches!(name, "comment" | "user") {
        return Ok(None);
    }
    let name = match name {
        "ro" => "read-only".to_owned(),
        "noexec" => "no-exec".to_owned(),
        name => name.replace('_', "-"),
    };
    let command = Options::command();
    let known = command.get_arguments().find(|argument| argument.get_long() == Some(&*name));
    let known = known.with_context(|| format!("{option} is no option of this file system"))?;
    let takes_value = known.get_action().takes_values();
    match value {
        None if takes_value => bail!("{name} needs a value: {name}=..."),
        Some(_) if !takes_value => bail!("{name} takes no value"),
        Some(value) => Ok(Some(format!("--{name}={value}").into())),
        None => Ok(Some(format!("--{name}").into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(arguments: &str) -> Result<Option<Options>> {
        let arguments: Vec<OsString> = arguments.split(' ').map(Into::into).collect();
        options(&arguments)
    }

    #[test]
    fn each_option_of_the_program_is_one_of_mount() {
        let line = "source target -n -o rw,noauto,x-systemd.automount,memory=1G,dirty_age=5s \
                    -o kernel_cache,allow-other,metrics=9100,log=/log,threads=2,ro -t fuse.bifolio";
        let options = of(line).unwrap().unwrap();
        assert_eq!((options.memory, options.threads), (1 << 30, 2));
        assert_eq!(
            (options.source.as_path(), options.target.as_path()),
            (Path::new("source"), Path::new("target"))
        );
        assert_eq!(options.dirty_age.as_secs(), 5);
        assert!(options.kernel_cache && options.allow_other && options.background);
        // As `user` in a line of /etc/fstab implies.
        assert!(of("source target -o noexec,nosuid,nodev,user").unwrap().unwrap().no_exec);
        assert!(options.read_only && options.metrics.is_some() && options.log.is_some());
        assert!(of("source target -f").unwrap().is_none());
        assert!(of("source target -s -o whatever").unwrap().is_some());
    }

    #[test]
    fn other_options_and_changes_of_a_mount_are_refused() {
        for (asked, said) in [
            ("remount,ro", "cannot be changed"),
            ("sync", "no option"),
            ("memory", "needs a value"),
            ("direct=1", "takes no value"),
        ] {
            let error = of(&format!("source target -o {asked}")).unwrap_err();
            assert!(error.to_string().contains(said), "{asked}: {error}");
        }
    }
}
