"""Language and country codes that hreflang accepts: ISO 639-1, and optionally ISO 15924 and ISO 3166-1 alpha-2."""

from __future__ import annotations

import re

_LANGUAGES = """
    aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en
    eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka
    kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl
    nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw
    ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
_COUNTRIES = """
    ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bl bm bn bo bq br bs bt bv bw by bz ca
    cc cd cf cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg eh er es et fi fj fk fm fo fr ga gb
    gd ge gf gg gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im in io iq ir is it je jm jo jp ke kg
    kh ki km kn kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md me mf mg mh mk ml mm mn mo mp mq mr ms mt mu mv
    mw mx my mz na nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pm pn pr ps pt pw py qa re ro rs ru rw sa sb
    sc sd se sg sh si sj sk sl sm sn so sr ss st sv sx sy sz tc td tf tg th tj tk tl tm tn to tr tt tv tw tz ua ug um us
    uy uz va vc ve vg vi vn vu wf ws ye yt za zm zw
"""
_LANGUAGE_CODES, _COUNTRY_CODES = frozenset(_LANGUAGES.split()), frozenset(_COUNTRIES.split())
_COUNTRY_MISTAKES = {"uk": "gb", "en": "gb"}
_LANGUAGE_MISTAKES = {"jp": "ja", "cz": "cs", "dk": "da", "cn": "zh", "gr": "el", "ua": "uk", "us": "en", "gb": "en"}


def problem_of(code: str) -> str:
    """Returns the reason why an hreflang value is invalid; empty if it is valid."""
    parts = code.strip().lower().split("-")
    if parts == ["x", "default"]:
        return ""
    if "_" in code:
        return "has an underscore; write a hyphen"
    language, *rest = parts
    if language not in _LANGUAGE_CODES:
        hint = _LANGUAGE_MISTAKES.get(language)
        return f"{language!r} is not a language of ISO 639-1" + (f"; write {hint}" if hint else "")
    if rest and re.fullmatch(r"[a-z]{4}", rest[0]):  # a script, such as zh-Hant
        rest = rest[1:]
    if not rest:
        return ""
    if len(rest) > 1 or rest[0] not in _COUNTRY_CODES:
        hint = _COUNTRY_MISTAKES.get(rest[0])
        return f"{'-'.join(rest)!r} is not a country of ISO 3166-1" + (f"; write {hint}" if hint else "")
    return ""
