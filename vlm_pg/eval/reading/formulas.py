"""Formulas of common substances, for options that are their names."""

from __future__ import annotations

FORMULAS = {
    "hydrogen": "H2", "oxygen": "O2", "nitrogen": "N2", "chlorine": "Cl2", "fluorine": "F2", "bromine": "Br2",
    "iodine": "I2", "ozone": "O3", "water": "H2O", "hydrogen peroxide": "H2O2", "carbon dioxide": "CO2",
    "carbon monoxide": "CO", "methane": "CH4", "ammonia": "NH3", "sulfur dioxide": "SO2", "sulphur dioxide": "SO2",
    "nitrogen dioxide": "NO2", "hydrogen chloride": "HCl", "hydrochloric acid": "HCl", "sulfuric acid": "H2SO4",
    "sulphuric acid": "H2SO4", "nitric acid": "HNO3", "sodium chloride": "NaCl", "sodium hydroxide": "NaOH",
    "potassium hydroxide": "KOH", "calcium carbonate": "CaCO3", "calcium hydroxide": r"Ca\(OH\)2",
    "copper sulfate": "CuSO4",
    "silver nitrate": "AgNO3", "potassium permanganate": "KMnO4", "hydrogen sulfide": "H2S", "iron oxide": "Fe2O3",
    "ethanol": "C2H5OH", "glucose": "C6H12O6",
}  # fmt: skip
