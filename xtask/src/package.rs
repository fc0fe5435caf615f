//! `cargo x package`: what crates.io would get of each crate that is to be published.
//!
//! Called by [`crate::step`] in its quick form, without the builds, and by people before a release.
//! It packages the crates of both workspaces whose manifest does not say `publish = false`, and
//! checks that each package holds both licences, a README whose links work outside the repository,
//! and no source file that includes one from outside the package.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::cargo::{self, Cargo, workspace_root};
use crate::process;

/// Manifests of the two workspaces.
pub const WORKSPACES: [&str; 2] = ["Cargo.toml", "doors/Cargo.toml"];
/// Files that every package holds.
const FILES: [&str; 3] = ["LICENSE-APACHE", "LICENSE-MIT", "README.md"];

/// Options of `cargo x package`.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Arguments {
    /// Also build each package from its archive alone.
    #[arg(long)]
    pub build: bool,
}

/// A crate that is to be published.
struct Package {
    name: String,
    folder: PathBuf,
    /// Minimum version of Rust.
    rust_version: String,
    /// Names of the crates of this repository that it depends on.
    dependencies: Vec<String>,
}

/// Packages and checks the crates.
pub fn run(arguments: Arguments) -> Result<()> {
    let workspaces = WORKSPACES.map(packages).into_iter().collect::<Result<Vec<_>>>()?;
    for (manifest, packages) in WORKSPACES.into_iter().zip(&workspaces) {
        let mut cargo = Cargo::new("package --quiet --allow-dirty --manifest-path")
            .arguments(&[manifest.to_owned()]);
        if !arguments.build {
            cargo = cargo.arguments(&["--no-verify".to_owned()]);
        }
        for package in packages {
            cargo = cargo.arguments(&["-p".to_owned(), package.name.clone()]);
        }
        // The registry does not have the crates of the other workspace yet.
        for other in workspaces.iter().flatten() {
            let is_used = packages.iter().any(|it| it.dependencies.contains(&other.name));
            if is_used && !packages.iter().any(|it| it.name == other.name) {
                let folder = other.folder.display();
                let patch = format!("patch.crates-io.{}.path='{folder}'", other.name);
                cargo = cargo.arguments(&["--config".to_owned(), patch]);
            }
        }
        eprintln!("$ {cargo}");
        cargo.run()?;
        for package in packages {
            check(package, manifest).with_context(|| format!("the package {}", package.name))?;
        }
    }
    Ok(())
}

/// Returns the crates that are to be published, by the manifest of their workspace and their
/// minimum version of Rust.
pub fn published() -> Result<BTreeMap<(&'static str, String), Vec<String>>> {
    let mut published = BTreeMap::new();
    for manifest in WORKSPACES {
        for package in packages(manifest)? {
            let names: &mut Vec<_> = published.entry((manifest, package.rust_version)).or_default();
            names.push(package.name);
        }
    }
    Ok(published)
}

/// Returns the crates of a workspace that are to be published.
fn packages(manifest: &str) -> Result<Vec<Package>> {
    let output =
        query(&["metadata", "--no-deps", "--format-version=1", "--manifest-path", manifest])?;
    let metadata: Value = serde_json::from_str(&output).context("cargo metadata")?;
    let packages = metadata["packages"].as_array().context("cargo metadata has no packages")?;
    let published = packages.iter().filter(|package| package["publish"].is_null());
    let text = |value: &Value| value.as_str().map(str::to_owned).context("cargo metadata");
    published
        .map(|package| {
            let local = package["dependencies"].as_array().into_iter().flatten();
            let local = local.filter(|it| !it["path"].is_null() && it["kind"] != "dev");
            let manifest = PathBuf::from(text(&package["manifest_path"])?);
            Ok(Package {
                name: text(&package["name"])?,
                folder: manifest.parent().unwrap_or(&manifest).to_owned(),
                rust_version: text(&package["rust_version"])?,
                dependencies: local.map(|it| text(&it["name"])).collect::<Result<_>>()?,
            })
        })
        .collect()
}

/// Checks the files of one package.
fn check(package: &Package, manifest: &str) -> Result<()> {
    let arguments =
        ["package", "--list", "--allow-dirty", "--manifest-path", manifest, "-p", &package.name];
    let list = query(&arguments)?;
    for file in FILES {
        ensure!(list.lines().any(|line| line == file), "it has no {file}");
    }
    let readme = std::fs::read_to_string(package.folder.join("README.md")).context("README.md")?;
    if let Some(link) = relative_link(&readme) {
        anyhow::bail!("README.md links to {link}, which is relative");
    }
    for file in list.lines().filter(|line| line.ends_with(".rs")) {
        let source = std::fs::read_to_string(package.folder.join(file)).context(file.to_owned())?;
        if let Some(path) = outside(Path::new(file), &source) {
            anyhow::bail!("{file} includes {path}, which is outside of the package");
        }
    }
    eprintln!("{}: {} files", package.name, list.lines().count());
    Ok(())
}

/// Returns the first link of a document that is no address of its own.
fn relative_link(document: &str) -> Option<&str> {
    let links = document.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
    links.into_iter().find(|link| !link.starts_with("https://") && !link.starts_with('#'))
}

/// Returns the first file that `source`, at `file` in its package, includes from outside of it.
fn outside<'a>(file: &Path, source: &'a str) -> Option<&'a str> {
    let included = source.split("include_").skip(1).filter_map(|rest| {
        let rest = rest.strip_prefix("str!(\"").or_else(|| rest.strip_prefix("bytes!(\""))?;
        rest.split('"').next()
    });
    let depth = file.components().count() - 1;
    included.into_iter().find(|path| {
        let up = Path::new(path).components().filter(|it| *it == Component::ParentDir).count();
        up > depth
    })
}

/// Runs cargo for what it prints.
fn query(arguments: &[&str]) -> Result<String> {
    process::output(Command::new(cargo::program()).args(arguments).current_dir(workspace_root()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_links_with_an_address_work_on_another_site() {
        let fine = "[a](https://example.org/a.md), [b](#below)";
        assert_eq!(relative_link(fine), None);
        assert_eq!(relative_link("![plot](docs/plot.svg \"title\")"), Some("docs/plot.svg"));
    }

    #[test]
    fn a_file_may_include_what_is_in_its_package() {
        let include = |path: &str| format!("let page = include_str!(\"{path}\");");
        let inside = include("../README.md");
        assert_eq!(outside(Path::new("src/lib.rs"), &inside), None);
        let left = include("../../../README.md");
        assert_eq!(outside(Path::new("src/lib.rs"), &left), Some("../../../README.md"));
        assert_eq!(outside(Path::new("src/deep/down/lib.rs"), &left), None);
    }
}
