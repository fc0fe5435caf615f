//! `bifolio features`: what the kernel offers, what is in use, and why not.

use bifolio::FeatureReport;
use comfy_table::{ContentArrangement, Table, presets};

use crate::output;

/// Columns of the narrowest terminal.
const WIDTH: u16 = 80;

/// Prints one row for each probe.
pub(crate) fn run() -> anyhow::Result<()> {
    output::print(&format!("{}\n", table(&bifolio::features())))
}

fn table(features: &[FeatureReport]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_BORDERS_ONLY)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(WIDTH);
    table.set_header(["feature", "in use", "why, and what stands in"]);
    for feature in features {
        let (in_use, why) = if feature.in_use {
            ("yes", feature.reason.clone())
        } else {
            ("no", format!("{}; instead: {}", feature.reason, feature.fallback))
        };
        table.add_row([feature.name, in_use, &why]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_long_reasons_fits_80_columns() {
        let mut features = bifolio::features();
        for feature in &mut features {
            feature.in_use = false;
            feature.reason = format!("{0}: {0}", "no kernel support, or a filter".repeat(3));
        }
        let text = table(&features).to_string();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("instead:"), "{text}");
    }
}
