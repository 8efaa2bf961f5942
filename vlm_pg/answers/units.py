"""Units of measurement: which are the same, and by what factor others of their kind differ."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# "kind: unit factor, ...": names of one unit are joined by "=". Symbols are distinguished by case, names are not.
_TABLE = """
length: nm=nanometer=nanometre 1e-9, μm=um=micrometer=micrometre=micron 1e-6, mm=millimeter=millimetre=毫米 1e-3,
    cm=centimeter=centimetre=厘米=公分 1e-2, dm=decimeter=decimetre=分米 1e-1, m=meter=metre=米=公尺 1,
    km=kilometer=kilometre=kms=千米=公里 1e3, inch=inches=英寸 0.0254, ft=foot=feet=英尺 0.3048, yd=yard 0.9144,
    mi=mile=英里 1609.344
mass: μg=ug=microgram 1e-9, mg=milligram=毫克 1e-6, g=gram=gramme=gm=克 1e-3, kg=kilogram=kilo=kgs=千克=公斤 1,
    tonne=吨 1e3, lb=lbs=pound 0.45359237, oz=ounce 0.028349523125
time: ns=nanosecond 1e-9, μs=us=microsecond 1e-6, ms=millisecond=毫秒 1e-3, s=sec=secs=second=秒=秒钟 1,
    min=mins=minute=分钟 60, h=hr=hrs=hour=小时 3600, day=天 86400, week=周=星期 604800, month=个月 2629800,
    year=yr=yrs=年 31557600
volume: ml=mL=milliliter=millilitre=毫升 1e-6, cl=cL=centiliter 1e-5, l=L=liter=litre=升 1e-3, gallon=gal 0.003785411784
angle: °=deg=degree=度 1, rad=radian 57.29577951308232
celsius: °C=℃=celsius=摄氏度 1
fahrenheit: °F=fahrenheit=华氏度 1
kelvin: K=kelvin 1
dollar: $=dollar 1, cent=cents=¢ 0.01
us dollar: USD=US$=usd=美元 1
hong kong dollar: HK$=HKD=港元=港币 1
australian dollar: A$=AUD 1
canadian dollar: C$=CAD 1
euro: €=EUR=euro=欧元 1
sterling: £=GBP=quid 1
yuan: CNY=RMB=yuan=元=人民币=块 1
yen: JPY=yen=日元 1
yen or yuan: ¥ 1
ringgit: RM=MYR=ringgit 1
rupee: ₹=INR=rupee=Rs=rs 1
voltage: μV=uV=microvolt 1e-6, mV=millivolt 1e-3, V=volt=伏 1, kV=kilovolt 1e3, MV=megavolt 1e6
current: μA=uA=microamp 1e-6, mA=milliamp 1e-3, A=amp=ampere=安 1
power: mW=milliwatt 1e-3, W=watt=瓦 1, kW=kilowatt=千瓦 1e3, MW=megawatt 1e6, GW=gigawatt 1e9
energy: J=joule=焦 1, kJ=kilojoule 1e3, MJ=megajoule 1e6, kWh 3600000, cal=calorie 4.184, kcal=kilocalorie 4184
force: N=newton=牛 1, kN=kilonewton 1e3
pressure: Pa=pascal 1, hPa=hectopascal 1e2, kPa=kilopascal 1e3, MPa=megapascal 1e6, bar 1e5, atm 101325
frequency: Hz=hertz=赫兹 1, kHz=kilohertz 1e3, MHz=megahertz 1e6, GHz=gigahertz 1e9
resistance: Ω=ohm=欧姆 1, kΩ=kilohm 1e3
amount: mol=mole 1, mmol=millimole 1e-3
speed: mph 0.44704, kph=kmph=kmh 0.2777777777777778, fps 0.3048
data: kB=KB=kilobyte 1e3, MB=megabyte 1e6, GB=gigabyte 1e9, TB=terabyte 1e12
"""
_OF_SPEED = ("mph", "kph", "fps")
_POWERS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3, "cu.": 3, "平方": 2, "立方": 3}
_FACTOR = re.compile(
    r"(?:(?P<power>square|sq\.?|cubic|cu\.?|平方|立方)\s{0,2})?(?P<name>(?:US|HK|A|C)\$|[^\W\d_]{1,12}|°\s?[CF]?|[$€£¥₹¢℃])"
    r"(?:\s?\^\s?\{?\s?(?P<exponent>-?[1-4])\s?\}?|(?P<glued>[23])(?!\d))?"
)
_SEPARATOR = re.compile(r"\s{0,2}(?:(?P<divides>/|\bper\b|每)|[·*.⋅-]?)\s{0,2}")
MAX_UNIT_CHARACTERS = 40


# What one sign may mean: "20 degrees" are of an angle or of either temperature, and "¥" is of two currencies.
_EITHER = {
    "angle": ("celsius", "fahrenheit"),
    "yen or yuan": ("yen", "yuan"),
    "dollar": ("us dollar", "hong kong dollar", "australian dollar", "canadian dollar"),
}
_SAME_BY_SIGN: dict[tuple[tuple[str, int], ...], set[tuple[tuple[str, int], ...]]] = {
    ((one, 1),): {((other, 1),) for other in others} for one, others in _EITHER.items()
}
_DEGREES_OF = re.compile(r"(?:°|deg|degrees?)\s?(c|f|celsius|fahrenheit)", re.IGNORECASE)


@dataclass(frozen=True)
class Unit:
    """``kind``: powers of the kinds of its factors, as (("length", 1), ("time", -1)); ``factor``: of the kind's own
    unit."""

    kind: tuple[tuple[str, int], ...]
    factor: Fraction
    name: str

    def factor_to(self, other: Unit) -> Fraction | None:
        """What a number in this unit is multiplied by to be one in ``other``; None if they measure different things."""
        is_same = self.kind == other.kind or any(
            one in _SAME_BY_SIGN.get(two, ()) for one, two in ((self.kind, other.kind), (other.kind, self.kind))
        )
        return self.factor / other.factor if is_same else None


def _read_table() -> dict[str, tuple[str, Fraction, str]]:
    units: dict[str, tuple[str, Fraction, str]] = {}
    for line in _TABLE.strip().replace("\n    ", " ").splitlines():
        kind, _, entries = line.partition(": ")
        for entry in entries.split(", "):
            names, _, factor = entry.strip().rpartition(" ")
            first, *_ = names.split("=")
            for name in names.split("="):
                units[name] = (kind, Fraction(factor), first)
                if len(name) > 3 and name.isascii():
                    units.setdefault(name + "s", units[name])
    return units


_UNITS = _read_table()


def parse_unit(text: str) -> Unit | None:
    """The unit that all of ``text`` is ("km/h", "square metres", "m^2", "kg·m/s^2"), or None.

    Names may be in any case and plural, symbols are read as written: "mW" is no "MW".
    """
    text = text.strip()
    if not text or len(text) > MAX_UNIT_CHARACTERS:
        return None
    if degrees := _DEGREES_OF.fullmatch(text):
        text = f"°{degrees[1][0].upper()}"
    powers: dict[str, int] = {}
    factor, sign, start = Fraction(1), 1, 0
    while start < len(text):
        found = _FACTOR.match(text, start)
        name = found["name"] if found else ""
        # A name of more than three letters may be in any case; shorter ones are symbols.
        folded = name.lower() if len(name) > 3 or not name.isascii() else name
        unit = _UNITS.get(name.replace(" ", "")) or _UNITS.get(folded)
        if not found or not unit:
            return None
        power = _POWERS.get(found["power"] or "", 1) * int(found["exponent"] or found["glued"] or 1) * sign
        kind, own_factor, first = unit
        for part, exponent in (("length", 1), ("time", -1)) if first in _OF_SPEED else ((kind, 1),):
            powers[part] = powers.get(part, 0) + exponent * power
        factor *= own_factor**power
        start = found.end()
        separator = _SEPARATOR.match(text, start)
        if separator and start < len(text):
            sign, start = (-1 if separator["divides"] else sign), separator.end()
    kinds = tuple(sorted((kind, power) for kind, power in powers.items() if power))
    if len(kinds) == 1 and kinds[0][0] == "volume":
        kinds = (("length", 3 * kinds[0][1]),)  # a litre is a thousandth of a cubic metre
    return Unit(kinds, factor, text)
