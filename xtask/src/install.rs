//! `cargo x install --prefix DIR`: installs the C interface and the extension of SQLite for
//! compilers and the loader.
//!
//! Where it stands: called by `main`. It builds the crates `bifolio-capi` and `bifolio-sqlite` for
//! release and copies:
//!
//! ```text
//!  PREFIX/include/bifolio.h
//!  PREFIX/lib/libbifolio.so.0.1.0          the shared library
//!  PREFIX/lib/libbifolio.so.0.1       ->   it, for the loader: its soname
//!  PREFIX/lib/libbifolio.so           ->   it, for the compiler
//!  PREFIX/lib/libbifolio.a
//!  PREFIX/lib/libbifolio_sqlite.so         found by `.load libbifolio_sqlite`
//!  PREFIX/lib/libbifolio_sqlite.a
//!  PREFIX/lib/pkgconfig/bifolio.pc
//! ```

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::cargo::{Cargo, workspace_root};

/// The command that is run.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Directory for the header and the libraries.
    #[arg(long, default_value = "/usr/local")]
    prefix: PathBuf,
}

/// Builds and copies.
pub fn run(arguments: &Arguments) -> Result<()> {
    Cargo::new("build --release -p bifolio-capi -p bifolio-sqlite")
        .run()
        .context("the build failed")?;
    let prefix = std::path::absolute(&arguments.prefix).context("--prefix")?;
    let crate_folder = workspace_root().join("doors/bifolio-capi");
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| workspace_root().join("target"), PathBuf::from)
        .join("release");
    let (include, lib) = (prefix.join("include"), prefix.join("lib"));
    for folder in [&include, &lib, &lib.join("pkgconfig")] {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let version = env!("CARGO_PKG_VERSION");
    let shared = format!("libbifolio.so.{version}");
    copy(&crate_folder.join("include/bifolio.h"), &include.join("bifolio.h"))?;
    copy(&target.join("libbifolio_capi.a"), &lib.join("libbifolio.a"))?;
    copy(&target.join("libbifolio_capi.so"), &lib.join(&shared))?;
    for name in ["libbifolio_sqlite.so", "libbifolio_sqlite.a"] {
        copy(&target.join(name), &lib.join(name))?;
    }
    for name in [soname(version), "libbifolio.so".to_owned()] {
        let link = lib.join(name);
        let _ = fs::remove_file(&link);
        symlink(&shared, &link).with_context(|| format!("cannot make {}", link.display()))?;
    }
    let file = lib.join("pkgconfig/bifolio.pc");
    fs::write(&file, pkg_config(&prefix, version)?)
        .with_context(|| format!("cannot write {}", file.display()))?;
    eprintln!("installed {version} in {}", prefix.display());
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    // A program may be running the old library: it keeps it.
    let _ = fs::remove_file(to);
    let copied = fs::copy(from, to);
    copied.with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// Returns the name by which programs load the library: before 1.0 each minor version has its own.
/// The build script of the crate sets it in the library.
fn soname(version: &str) -> String {
    let minor = version.rsplit_once('.').map_or(version, |(minor, _)| minor);
    format!("libbifolio.so.{minor}")
}

fn pkg_config(prefix: &Path, version: &str) -> Result<String> {
    let prefix = prefix.to_str().context("--prefix is not UTF-8")?;
    ensure!(!prefix.contains(char::is_whitespace), "pkg-config takes no prefix with spaces");
    Ok(format!(
        "prefix={prefix}\n\
         includedir=${{prefix}}/include\n\
         libdir=${{prefix}}/lib\n\
         \n\
         Name: bifolio\n\
         Description: A user-space page cache\n\
         Version: {version}\n\
         Cflags: -I${{includedir}}\n\
         Libs: -L${{libdir}} -lbifolio\n\
         Libs.private: -lgcc_s -lutil -lpthread -lm -ldl\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_asks_for_the_minor_version() {
        assert_eq!(soname("0.1.0"), "libbifolio.so.0.1");
        assert_eq!(soname("0.12.3"), "libbifolio.so.0.12");
    }

    #[test]
    fn pkg_config_names_the_prefix_once() {
        let text = pkg_config(Path::new("/opt/bifolio"), "0.1.0").unwrap();
        assert!(text.starts_with("prefix=/opt/bifolio\n"), "{text}");
        assert_eq!(text.matches("/opt").count(), 1, "{text}");
        assert!(pkg_config(Path::new("/a b"), "0.1.0").is_err());
    }
}
