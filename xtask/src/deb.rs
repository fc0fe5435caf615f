//! `cargo x deb`: a package for Debian of what `cargo x install` installs.
//!
//! Called by `main`. [`crate::install`] fills a folder, and `dpkg-deb` packs it.

use std::fs;
use std::process::Command;

use anyhow::Result;

use crate::cargo::target_folder;
use crate::{install, process};

/// Builds `target/deb/bifolio_VERSION_ARCHITECTURE.deb`.
pub fn run() -> Result<()> {
    let folder = target_folder().join("deb");
    let root = folder.join("root");
    let _ = fs::remove_dir_all(&root);
    install::run(&install::Arguments::staged(root.clone()))?;
    for folder in ["usr/bin", "usr/lib"] {
        for entry in fs::read_dir(root.join(folder))? {
            let entry = entry?;
            if entry.file_type()?.is_file() {
                process::output(Command::new("strip").arg("--strip-debug").arg(entry.path()))?;
            }
        }
    }
    let version = env!("CARGO_PKG_VERSION");
    let architecture = process::output(Command::new("dpkg").arg("--print-architecture"))?;
    let libc =
        process::output(Command::new("dpkg-query").args(["-W", "-f", "${Version}", "libc6"]))?;
    fs::create_dir_all(root.join("DEBIAN"))?;
    fs::write(root.join("DEBIAN/control"), control(version, architecture.trim(), libc.trim()))?;
    fs::write(root.join("DEBIAN/triggers"), "activate-noawait ldconfig\n")?;
    let file = folder.join(format!("bifolio_{version}_{}.deb", architecture.trim()));
    let mut pack = Command::new("dpkg-deb");
    process::output(pack.args(["--root-owner-group", "--build"]).arg(&root).arg(&file))?;
    eprintln!("made {}", file.display());
    Ok(())
}

/// Returns the description of the package, which was built with the C library `libc`.
fn control(version: &str, architecture: &str, libc: &str) -> String {
    let libc = libc.split(['-', '+']).next().unwrap_or(libc);
    format!(
        "Package: bifolio\n\
         Version: {version}\n\
         Architecture: {architecture}\n\
         Maintainer: The Bifolio maintainers <maintainers@bifolio.invalid>\n\
         Section: database\n\
         Priority: optional\n\
         Depends: libc6 (>= {libc}), libgcc-s1\n\
         Recommends: fuse3\n\
         Suggests: sqlite3, pkg-config\n\
         Homepage: {}\n\
         Description: user-space page cache for storage engines and data systems\n \
         The programs bifolio and bifolio-mount, the C interface (libbifolio) and a loadable\n \
         extension of SQLite.\n",
        env!("CARGO_PKG_REPOSITORY")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_package_depends_on_the_release_of_the_c_library() {
        let control = control("0.1.0", "amd64", "2.36-9+deb12u10");
        assert!(control.contains("\nDepends: libc6 (>= 2.36), libgcc-s1\n"), "{control}");
        assert!(control.contains("\n The programs bifolio"), "{control}");
        assert!(control.lines().all(|line| !line.trim().is_empty()), "{control}");
    }
}
